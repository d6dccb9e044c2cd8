"""Blocks that use a module or a weight outside of them: every stage that does has a copy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import Options
from plait.parallel.pipeline.dataflow import discover
from tests.helpers.threaded import threaded
from tests.parity.few_steps import batch, drawn, losses, plain
from tests.parity.harness import TOLERANCE

WIDTH = 6


class Calling(nn.Module):
    """A block that calls a module which it gets, as a position bias of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: nn.Module) -> Tensor:
        return torch.tanh(self.inner(x) + bias(torch.arange(WIDTH)).squeeze(-1))


class Reading(Calling):
    """A block that reads the weight of a module which it gets."""

    def forward(self, x: Tensor, bias: nn.Module) -> Tensor:
        weight = bias.weight
        assert isinstance(weight, Tensor)
        return torch.tanh(self.inner(x) + weight.squeeze(-1))


class Biased(nn.Module):
    """Blocks that share a table of the model."""

    def __init__(self, kind: type[Calling]) -> None:
        super().__init__()
        self.bias = nn.Embedding(WIDTH, 1)
        self.layers = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.bias)
        return self.head(x)


@pytest.mark.parametrize("kind", [Calling, Reading])
@pytest.mark.parametrize("plan", ["pp2:1f1b mb2", "pp2:interleaved,v2 mb2", "pp2:zbv mb2"])
def test_equals_one_device(kind: type[Calling], plan: str) -> None:
    model, pair = drawn(Biased(kind)), batch(WIDTH)
    expected = plain(copy.deepcopy(model), pair)

    def trained(world: World) -> list[float]:
        options = Options(blocks="layers.*")
        return losses(world, copy.deepcopy(model), plan, pair, options=options)

    for found in threaded(2, trained, plan=plan):
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=0)


def test_a_module_without_memory_is_called_by_a_block() -> None:
    with torch.device("meta"):
        model = Biased(Calling)
    names = [f"layers.{number}" for number in range(4)]
    flow = discover(model, names, lambda: model(torch.zeros(1, WIDTH)))
    assert flow.calls == (*names, "head")
    assert all("bias.weight" in weights for weights in flow.weights[:4])
