"""Functions that make groups by what a rank's parts of parameters do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait.comm import World
from plait.engine.build import build
from plait.errors import OptimizerError
from plait.models.parameters import Parameters
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity.few_steps import STEPS, batch, drawn
from tests.parity.harness import join
from tests.parity.test_draws_of_updates import falling

WIDTH = 6
Make = Callable[[Any], torch.optim.Optimizer]


def model() -> nn.Module:
    return drawn(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)))


def decayed(params: Iterable[nn.Parameter], chosen: Iterable[bool]) -> torch.optim.Optimizer:
    pairs = list(zip(params, chosen, strict=True))
    groups = [
        {"params": [one for one, is_decayed in pairs if is_decayed is kind], "weight_decay": decay}
        for kind, decay in ((True, 0.5), (False, 0.0))
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)


def by_shape(params: Parameters) -> torch.optim.Optimizer:
    named = params.named()
    return decayed(params, [len(params.whole_shape(name, one)) > 1 for name, one in named])


def by_size(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return decayed(params, [one.numel() > 30 for one in params])


def by_dims(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return decayed(params, [one.dim() > 1 for one in params])


def trained(world: World, network: nn.Module, plan: str, make: Make) -> list[Any]:
    engine = build(
        network, f"{plan} precision:float64", loss=F.mse_loss, optimizer=make, world=world
    )
    data = world.axis("dp")
    for _ in range(STEPS):
        engine.step(tuple(part.tensor_split(data.size)[data.rank] for part in batch(WIDTH)))
    shards = engine.local_parameters()
    return [(one.name, one.global_shape, one.index(), one.values.clone()) for one in shards]


def by_ranks(size: int, plan: str, make: Make) -> dict[str, torch.Tensor]:
    networks = [model() for _ in range(size)]
    return join(
        threaded(size, lambda world: trained(world, networks[world.rank], plan, make), plan=plan)
    )


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (by_size, "dp2:zero1"),
        (by_dims, "dp2:zero1"),
        (by_dims, "dp2:zero3"),
        (by_dims, "dp2:zero1 tp2"),
        (by_size, "tp2"),
        (falling, "dp2:zero1"),
        (falling, "pp2:1f1b mb2"),
        (falling, "dp2:server"),
    ],
)
def test_groups_that_parts_would_change_are_refused(make: Make, plan: str) -> None:
    with pytest.raises(OptimizerError, match=r"make groups by name \(params\.named\(\)\)"):
        by_ranks(Plan.parse(plan).world_size, plan, make)


def test_parts_of_a_tensor_axis_have_the_dims_of_the_model() -> None:
    alone, found = by_ranks(1, "dp1", by_dims), by_ranks(2, "tp2", by_dims)
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("plan", ["dp2:zero1", "dp2:zero3", "pp2:1f1b mb2", "tp2", "dp2:server"])
def test_groups_by_shapes_in_the_model_equal_one_device(plan: str) -> None:
    alone = by_ranks(1, "dp1", by_dims)
    found = by_ranks(2, plan, by_shape)
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-11)


def test_a_function_that_reads_values_is_not_looked_at() -> None:
    def by_values(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        assert all(one.device.type == "cpu" and float(one.detach().sum()) for one in params)
        return torch.optim.SGD(params, lr=0.1)

    by_ranks(2, "dp2:zero1", by_values)
