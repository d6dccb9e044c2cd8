"""Blocks that keep statistics, histories, tables and sizes train under a pipeline as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import World
from plait.errors import ModelError
from plait.parallel.pipeline.dataflow import discover
from plait.parallel.pipeline.watch import UNRETURNED
from tests.helpers.sgd import drawn_batch, sgd_engine
from tests.helpers.threaded import threaded

PLANS = ("pp2 mb4", "pp2:1f1b mb4", "pp2:zbv mb4", "pp2:interleaved mb4")


class Residual(nn.Module):
    """A block that keeps something of its result."""

    scale: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.history: list[Tensor] = []
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x).tanh() * self.scale
        self.keep(x)
        return x

    def keep(self, x: Tensor) -> None:
        raise NotImplementedError


class History(Residual):
    def keep(self, x: Tensor) -> None:
        self.history.append(x.detach().mean())


class InTraining(Residual):
    def keep(self, x: Tensor) -> None:
        self.aux = x.square().mean() if self.training else None


class NumberOfPython(Residual):
    """In an evaluation the loss of the block is a number of Python."""

    def keep(self, x: Tensor) -> None:
        aux = x.square().mean()
        self.aux = aux if self.training else aux.item()


class InfiniteSlope(Residual):
    """A statistic that nobody reads, with an infinite derivative."""

    def keep(self, x: Tensor) -> None:
        self.aux = (x - x).abs().sqrt().mean()


class Average(Residual):
    """A block that scales by a moving average of its results."""

    def keep(self, x: Tensor) -> None:
        self.scale = 0.5 * self.scale + 0.5 * x.detach().abs().mean()


class InPlace(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.aux = torch.zeros((), dtype=torch.float64)

    def keep(self, x: Tensor) -> None:
        self.aux.copy_(x.detach().square().mean())


class Sized(Residual):
    """A block that keeps the size of what it gets, for the end of the model."""

    size: Any = None

    def keep(self, x: Tensor) -> None:
        self.size = (x.shape[0], 2, 3)


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        size = getattr(self.blocks[0], "size", x.shape)
        return x.reshape(size).flatten(1)

    def losses(self) -> Any:
        """The losses that the blocks have left, where they leave any."""
        return sum(block.aux for block in self.blocks if block.aux is not None)


def losses(world: World, models: list[Any], plan: str, reads: bool) -> list[float]:
    model = models[world.rank]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + (model.losses() if reads else 0)

    engine = sgd_engine(world, model, plan, loss, 0.5)
    batch = drawn_batch(8)
    found = [engine.evaluate(batch)]
    for _ in range(3):
        found += [engine.step(batch, trace=False).loss, engine.evaluate(batch)]
    return found


def trained(block: Callable[[], nn.Module], plan: str, reads: bool) -> list[float]:
    num_ranks = 2 if "pp2" in plan else 1
    models = []
    for _ in range(num_ranks):
        torch.manual_seed(0)
        models.append(Stack(block).double())
    return threaded(num_ranks, lambda world: losses(world, models, plan, reads), plan=plan)[0]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("block", [History, InTraining, InfiniteSlope, Average, Sized])
def test_what_blocks_keep_for_themselves_changes_nothing(block: Any, plan: str) -> None:
    expected = trained(block, "dp1 mb4", reads=False)
    assert trained(block, plan, reads=False) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("block", [InTraining, NumberOfPython, InPlace])
def test_a_loss_reads_what_blocks_keep(block: Any, plan: str) -> None:
    expected = trained(block, "dp1 mb4", reads=True)
    assert trained(block, plan, reads=True) == pytest.approx(expected, rel=1e-12)


class Reading(Stack):
    """The model itself reads the newest of each history."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.history[-1] for block in self.blocks)


def test_a_growing_list_that_the_model_reads_is_refused() -> None:
    def run(world: World, models: list[nn.Module]) -> list[float]:
        return losses(world, models, "pp2 mb4", False)

    model = Reading(History).double()
    models = [model, copy.deepcopy(model)]
    with pytest.raises(ModelError, match=r"'blocks.0.history' holds 2 tensors and held 1"):
        threaded(2, run, models, plan="pp2 mb4")


class Rotary(nn.Module):
    """A table that is made in the first call."""

    table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[-1]:
            self.table = torch.arange(x.shape[-1], dtype=x.dtype).cos()
        return x * self.table


class Rotated(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.linear, self.rotary = nn.Linear(6, 6), rotary

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rotary(self.linear(x).tanh())


def chain_around_one_rotary() -> nn.Module:
    rotary = Rotary()
    return nn.Sequential(*(Rotated(rotary) for _ in range(4)))


@pytest.mark.parametrize("plan", PLANS)
def test_blocks_of_a_chain_may_share_a_module_that_keeps_a_table(plan: str) -> None:
    def run(plan: str) -> list[float]:
        torch.manual_seed(0)
        model = chain_around_one_rotary().double()
        models = [model, copy.deepcopy(model)]
        ranks = 2 if "pp2" in plan else 1
        return threaded(ranks, lambda world: losses(world, models, plan, False), plan=plan)[0]

    assert run(plan) == pytest.approx(run("dp1 mb4"), rel=1e-12)


class Codebook(nn.Module):
    """A block with a table that follows what it gets, as a codebook does."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.linear(x).tanh() * self.table
        self.table.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return y


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


class Twice(Stack):
    """Every block is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def two_steps(block: Callable[[], nn.Module], plan: str) -> list[float]:
    def run(world: World) -> list[float]:
        return losses(world, models, plan, False)[1::2]

    model = Twice(block).double()
    models = [copy.deepcopy(model) for _ in range(2)]
    return threaded(2 if "pp2" in plan else 1, run, plan=plan)[0]


def test_a_block_on_two_stages_whose_table_follows_its_inputs_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'blocks.0' leaves .* in a buffer that it writes into"):
        two_steps(Codebook, "pp2 mb1")


def test_a_block_on_two_stages_may_keep_statistics_that_training_does_not_read() -> None:
    torch.manual_seed(0)
    expected = two_steps(Normed, "dp1")
    torch.manual_seed(0)
    assert two_steps(Normed, "pp2 mb1") == pytest.approx(expected, rel=1e-9)


class Tabled(nn.Module):
    """A block that adds a table of constants, which all blocks share."""

    def __init__(self, tables: dict[str, Tensor], made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.tables, self.made = tables, made

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        for _ in range(4):
            y = (2 * y).sin()  # memory that is free again, for tables to lie in
        if "table" not in self.tables:
            self.tables["table"] = self.made(x)
        return x + y + self.tables["table"]


def written(x: Tensor) -> Tensor:
    table = torch.zeros(6, dtype=x.dtype)
    table[0::2] = torch.arange(3, dtype=x.dtype).sin()
    return table


def of_shapes(x: Tensor) -> Tensor:
    return x.new_ones(6).cumsum(-1)


def in_reused_memory(x: Tensor) -> Tensor:
    return (2 * torch.arange(6, dtype=x.dtype)).sin()


@pytest.mark.parametrize("made", [written, of_shapes, in_reused_memory])
def test_tables_of_constants_that_blocks_share_are_no_results(made: Any) -> None:
    tables: dict[str, Tensor] = {}
    model = Stack(lambda: Tabled(tables, made)).double()
    x = torch.randn(2, 6, dtype=torch.float64)
    flow = discover(model, [f"blocks.{index}" for index in range(4)], lambda: model(x))
    assert not [one for needs in flow.needs for one in needs if one.leaf == UNRETURNED]


class AppendingAfterwards(Tabled):
    """A block whose result in a list lies where something of its own has lain before."""

    def forward(self, x: Tensor, collected: list[Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        collected.append(x.square())
        return x


class Collecting(Stack):
    def forward(self, x: Tensor) -> Tensor:
        collected: list[Tensor] = []
        for block in self.blocks:
            x = block(x, collected)
        return x + sum(collected)


def test_every_tensor_that_a_block_appends_is_seen_in_reused_memory() -> None:
    table = {"table": torch.ones(6, dtype=torch.float64)}
    model = Collecting(lambda: AppendingAfterwards(table, written)).double()
    x = torch.randn(2, 6, dtype=torch.float64)
    flow = discover(model, [f"blocks.{index}" for index in range(4)], lambda: model(x))
    left = {one.call for one in flow.needs[-1] if one.leaf == UNRETURNED}
    assert left == {0, 1, 2, 3}
