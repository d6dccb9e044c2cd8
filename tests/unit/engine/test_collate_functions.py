"""A collate function of the user's own sees whole batches under every plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import plait
from plait.comm import World
from plait.engine.prepare import share
from plait.errors import DataError
from tests.helpers.threaded import threaded
from tests.unit.engine.test_prepare import world_of

Samples = list[tuple[Tensor, Tensor]]
Collate = Callable[[Samples], Any]


def drawn() -> Samples:
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, 11, 6, generator=draw, dtype=torch.float64).unbind()
    return list(zip(inputs, targets, strict=True))


def stacked(samples: Samples) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def normalised(samples: Samples) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(samples)
    return (inputs - inputs.mean(0)) / (inputs.std(0, correction=0) + 1e-3), targets


def mixed_up(samples: Samples) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(samples)
    return 0.7 * inputs + 0.3 * inputs.flip(0), 0.7 * targets + 0.3 * targets.flip(0)


def trained(model: nn.Module, collate: Collate, workers: int) -> list[float]:
    loader = DataLoader(drawn(), batch_size=4, collate_fn=collate, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("plan", ["dp2", "dp3:zero2 mb2", "dp2:zero3"])
@pytest.mark.parametrize("collate", [normalised, mixed_up])
def test_a_collate_function_sees_the_batches_of_one_device(
    collate: Collate, plan: str, workers: int
) -> None:
    if workers and plan != "dp2":
        pytest.skip("workers start the same way under every plan")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    expected = trained(copy.deepcopy(model), collate, workers)

    def on_rank(world: World) -> list[float]:
        engine = plait.build(
            copy.deepcopy(model),
            f"{plan} precision:float64",
            loss=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            world=world,
        )
        loader = DataLoader(drawn(), batch_size=4, collate_fn=collate, num_workers=workers)
        return [engine.step(batch, trace=False).loss for batch in engine.prepare(loader)]

    for found in threaded(int(plan[2]), on_rank, plan=plan):
        assert found == pytest.approx(expected, rel=1e-10)


def parts(collate: Collate, size: int, shares: tuple[int, ...] = ()) -> list[list[Any]]:
    """The batches of each rank."""
    loader = DataLoader(drawn(), batch_size=4, collate_fn=collate)
    return [list(share(loader, world_of(size, rank), shares)) for rank in range(size)]


@pytest.mark.parametrize(("size", "shares"), [(2, ()), (2, (3, 1)), (5, ())])
def test_parts_join_to_whole_batches(size: int, shares: tuple[int, ...]) -> None:
    whole = list(DataLoader(drawn(), batch_size=4, collate_fn=normalised))
    for index, batch in enumerate(whole):
        of_ranks = [one[index] for one in parts(normalised, size, shares)]
        for leaf, full in enumerate(batch):
            assert torch.equal(torch.cat([one[leaf] for one in of_ranks]), full)


def packed(samples: Samples) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(samples)
    return inputs.flatten()[None], targets.flatten()[None]


def time_first(samples: Samples) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(samples)
    return inputs.T.contiguous(), targets.T.contiguous()


@pytest.mark.parametrize(("collate", "dim"), [(packed, 1), (time_first, 1)])
def test_a_batch_without_a_row_for_each_sample_is_made_of_a_ranks_own(
    collate: Collate, dim: int
) -> None:
    first, second = parts(collate, 2)
    whole = list(DataLoader(drawn(), batch_size=4, collate_fn=collate))
    for left, right, full in zip(first, second, whole, strict=True):
        assert torch.equal(torch.cat([left[0], right[0]], dim), full[0])


def uneven(samples: Samples) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(samples)
    return inputs, targets[:-1]


def test_first_dims_that_differ_are_named() -> None:
    with pytest.raises(DataError, match=r"they have \[1, 2\]"):
        parts(uneven, 2)
