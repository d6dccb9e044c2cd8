"""A forward that counts its calls is told of under micro-batches, and counted once under remat."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.comm import World
from tests.helpers.threaded import threaded


class Block(nn.Module):
    """Fades in over its first ten forwards; `kind`: where it counts them."""

    def __init__(self, kind: str = "number") -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=0.0)
        self.seen: float | Tensor = 0
        self.state = {"seen": 0, "rows": 0, "name": kind}
        self.rows = 0
        self.last = 0
        self.mean = 0.0
        if kind in ("buffer", "one"):
            del self.seen
            self.register_buffer("seen", torch.zeros((1,) if kind == "one" else ()))
        if kind == "factor":
            self.seen = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> the same."""
        if self.training and self.kind == "factor":
            self.seen *= 0.9
        elif self.training and self.kind == "entry":
            self.state["seen"] += 1
            self.seen = self.state["seen"]
        elif self.training and self.kind != "no":
            self.seen += 1
        self.state["rows"] += x.size(0)
        self.rows += x.size(0)
        self.last = x.size(1)
        self.mean = float(x.mean())
        return x + self.linear(x).tanh() * self.seen / 10


class Model(nn.Module):
    """Two blocks."""

    def __init__(self, kind: str = "number") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> the same."""
        for block in self.blocks:
            x = block(x)
        return x


def train(plan: str, kind: str = "number", *, ranks: int = 1) -> tuple[list[float], list[str]]:
    """The losses of three steps of 8 samples, and the warnings about numbers."""

    def run(world: World) -> list[float]:
        model = copy.deepcopy(whole)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = plait.build(model, plan, loss=mean_square, optimizer=optimizer, world=world)
        batches = engine.prepare([(x, -x) for x in data])
        return [engine.step(batch).loss for batch in batches]

    torch.manual_seed(0)
    whole = Model(kind)
    data = torch.randn(3, 8, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = threaded(ranks, run, plan=plan)[0]
    return losses, [str(one.message) for one in caught if "counts in" in str(one.message)]


def mean_square(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over samples."""
    return (output - targets).square().mean(1).sum(), torch.tensor(float(len(output)))


@pytest.mark.parametrize("kind", ["number", "buffer", "one", "factor"])
def test_a_count_of_micro_batches_is_told_once(kind: str) -> None:
    (text,) = train("dp1 mb2", kind)[1]
    assert "counts in 'blocks.0.seen', 'blocks.1.seen', and the plan 'mb2'" in text
    assert "2 are counted where one device counts 1" in text


def test_a_count_in_a_dictionary_is_told() -> None:
    (text,) = train("dp1 mb2", "entry")[1]
    assert "'blocks.0.state[seen]'" in text
    assert "rows" not in text


def test_each_stage_tells_of_its_own_blocks() -> None:
    texts = train("dp2 pp2 mb2", ranks=4)[1]
    assert [text.split(",")[0] for text in sorted(texts)] == [
        f"the forward counts in 'blocks.{stage}.seen'" for stage in range(2)
    ]


@pytest.mark.parametrize("plan", ["dp1", "dp2:zero3", "tp2", "dp1 remat:full"])
def test_one_forward_a_step_is_not_told(plan: str) -> None:
    assert train(plan, ranks=1 if plan.startswith("dp1") else 2)[1] == []


def test_samples_and_last_values_are_not_told() -> None:
    assert train("dp1 mb2", "no")[1] == []


@pytest.mark.parametrize("kind", ["number", "factor"])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_remat_counts_a_forward_once(kind: str, policy: str) -> None:
    reference = train("dp1", kind)[0]
    assert train(f"dp1 remat:{policy}", kind)[0] == pytest.approx(reference, rel=1e-6)
    mb = train("dp1 mb2", kind)[0]
    assert train(f"dp1 mb2 remat:{policy}", kind)[0] == pytest.approx(mb, rel=1e-6)
