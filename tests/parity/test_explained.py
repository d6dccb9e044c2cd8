"""Errors inside a model that a plan has split: the sentence names the module, the line and the
cure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.stages.cut import Cutting
from plait.errors import ModelError
from plait.models.losses import cross_entropy
from tests.helpers.threaded import threaded

ROLES = {"q": "column", "o": "row", "head": "replicated"}


class Headed(nn.Module):
    """Has the number of its heads in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.o = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.q(x).view(x.shape[0], 4, 2)
        return self.head(self.o(heads.flatten(1)))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step(
    world: World, make: Callable[[], nn.Module], plan: str, inputs: Tensor, options: Options
) -> float:
    model = make()
    for param in model.parameters():  # ranks on threads share one generator: their values differ
        torch.nn.init.constant_(param, 0.1)
    engine = build(
        model,
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=options,
        world=world,
    )
    axis = engine.world.axis("dp")
    targets = torch.zeros(len(inputs), dtype=torch.int64)
    batch = [part.tensor_split(axis.size)[axis.rank] for part in (inputs, targets)]
    return engine.step(batch).loss


def message(num_ranks: int, *arguments: Any) -> str:
    with pytest.raises(ModelError) as found:
        threaded(num_ranks, step, *arguments, plan=arguments[1])
    return str(found.value)


def test_a_view_with_the_number_of_heads_names_its_line_and_the_cure() -> None:
    text = message(2, Headed, "tp2", torch.ones(3, 8), Options(roles=ROLES))
    line = f"{__file__}:{Headed.forward.__code__.co_firstlineno + 1}"
    assert line in text and "view(x.shape[0], 4, 2)" in text, text
    assert "asks for [3, 4, 2], and this rank has 1/2" in text and "put -1" in text
    assert "role is wrong" not in text


@pytest.mark.parametrize("plan", ["dp1 mb4", "dp2 mb2"])
def test_a_batch_norm_with_one_sample_a_slice(plan: str) -> None:
    ranks = 2 if "dp2" in plan else 1
    text = message(ranks, Normed, plan, torch.ones(4, 6), Options(blocks="layers.*"))
    assert "'layers.0.1' (BatchNorm1d) gets one value a channel, inputs of shape [1, 6]" in text
    assert "larger global_batch, a smaller mb or dp" in text


def test_a_batch_norm_and_an_example_of_one_sample() -> None:
    """Slices of four samples train, although their example is one; slices of one are refused."""
    options = Options(blocks="layers.*", cutting=Cutting(example=torch.ones(1, 6)))
    inputs = torch.arange(48.0).view(8, 6) % 7
    split = threaded(2, step, Normed, "pp2:1f1b mb2", inputs, options, plan="pp2:1f1b mb2")
    alone = threaded(1, step, Normed, "dp1 mb2", inputs, options, plan="dp1 mb2")
    assert split == pytest.approx(alone * 2, rel=1e-6)
    text = message(2, Normed, "pp2:1f1b mb4", torch.ones(4, 6), options)
    assert "'layers.0.1' (BatchNorm1d)" in text and "larger global_batch" in text


def test_an_example_has_the_precision_of_the_model() -> None:
    def make() -> nn.Module:
        return Normed().double()

    options = Options(blocks="layers.*")
    inputs = torch.arange(48.0).view(8, 6) % 7
    plan = "pp2:1f1b mb2 precision:float64"
    losses = threaded(2, step, make, plan, inputs, options, plan=plan)
    alone = threaded(1, step, make, "dp1 mb2 precision:float64", inputs, options, plan="dp1")
    assert losses == pytest.approx(alone * 2, rel=1e-12)
