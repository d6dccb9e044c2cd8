"""A step whose loss or gradient is no number is judged once for all ranks, and its origin named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.doctor.findings import RunFinding
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.errors import NonFiniteLoss, NotAvailable
from tests.helpers.threaded import threaded

PLANS = ("dp2", "dp2:zero1", "dp2:zero3", "pp2:1f1b mb2", "dp2 pp2:gpipe mb2")

DECIDED = pytest.mark.parametrize("later", [False, True], ids=["host", "device"])
SIZES = {"dp2 pp2:gpipe mb2": 4}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


with torch.random.fork_rng():
    torch.manual_seed(0)  # alike in every process that imports this file
    NET = Net()


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def engine_of(
    world: World, plan: str, net: nn.Module = NET, *, later: bool, **options: Any
) -> tuple[Engine, list[RunFinding]]:
    """An engine whose device decides on steps (`later`), or whose host does."""
    engine = build(
        copy.deepcopy(net),
        plan,
        loss=squared,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, fused=True),
        world=world,
        options=Options(defer_reads=later, **options),
    )
    said: list[RunFinding] = []
    engine.guard.listeners.append(said.append)
    return engine, said


def batch_of(world: World, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(world.worker[0])
    return torch.randn(size, 4, generator=generator), torch.randn(size, 4, generator=generator)


def with_a_bad_sample(world: World, plan: str, later: bool) -> Any:
    engine, said = engine_of(world, plan, later=later, on_nan="skip")
    inputs, targets = batch_of(world)
    engine.step((inputs, targets))
    before = [shard.values.clone() for shard in engine.local_parameters()]
    bad = inputs.clone()
    if world.worker[0] == world.worker[1] - 1:
        bad[1, 2] = float("inf")
    result = engine.step((bad, targets))
    same = [
        torch.equal(shard.values, earlier)
        for shard, earlier in zip(engine.local_parameters(), before, strict=True)
    ]
    after = engine.step((inputs, targets))
    return result.skipped, all(same), said, after.skipped, after.loss


@DECIDED
@pytest.mark.parametrize("plan", PLANS)
def test_a_bad_step_is_skipped_alike_and_its_sample_named(
    plan: str, later: bool, ranks: Callable[..., list[Any]]
) -> None:
    # Processes, not threads: threads share one random state, whose draws stages watch.
    told = ranks(SIZES.get(plan, 2), with_a_bad_sample, plan, later, plan=plan)
    assert all(skipped and same and not again for skipped, same, _, again, _ in told)
    assert len({loss for *_, loss in told}) == 1
    for _, _, (finding,), _, _ in told:
        assert finding == told[0][2][0]
        assert (finding.kind, finding.step) == ("nan", 2)
        assert finding.rank == told_rank(plan), finding
        assert finding.where == "the batch, micro-batch 0, sample 1"


def told_rank(plan: str) -> int:
    """The first rank of those with the last share of the batch that sees what is no number."""
    return {"dp2 pp2:gpipe mb2": 1}.get(plan, 0 if plan.startswith("pp") else 1)


def with_a_bad_weight(world: World, later: bool) -> Any:
    engine, said = engine_of(world, "dp2", later=later)
    if world.rank == 1:
        with torch.no_grad():
            next(engine.model.parameters())[0, 0] = float("nan")
    with pytest.raises(
        NonFiniteLoss, match=r"began on rank 1, in module layers.0, layers.0.weight"
    ):
        engine.step(batch_of(world))
        engine.settle()
    return said


@DECIDED
def test_a_weight_that_is_no_number_is_named_with_its_rank(later: bool) -> None:
    for (finding,) in threaded(2, with_a_bad_weight, later):
        assert (finding.rank, finding.details["module"]) == (1, "layers.0")


def with_a_bad_shard(
    world: World, plan: str, is_stored: bool, is_frozen: bool, later: bool
) -> list[RunFinding]:
    """The last rank damages what it keeps of the second layer's weight."""
    net = copy.deepcopy(NET)
    net.layers[1].requires_grad_(not is_frozen)
    engine, said = engine_of(world, plan, net, later=later)
    engine.step(batch_of(world))
    kept = [(piece.name, piece.value) for piece in engine.strategy.pieces]
    if is_stored:
        stored = engine.strategy.frozen_shards(trained=True)
        kept = [(shard.name, shard.values) for shard in stored]
    if world.rank == world.size - 1:
        values = [one for name, one in kept if name == "layers.1.weight"][-1]
        with torch.no_grad():
            values.view(-1)[0] = float("nan")
    for _ in range(2):  # a master that is damaged is published first
        try:
            engine.step(batch_of(world))
            engine.settle()
        except NonFiniteLoss:
            return said
    raise AssertionError("both steps counted")


@DECIDED
@pytest.mark.parametrize(
    ("plan", "is_stored", "is_frozen"),
    [
        ("dp2:zero3", False, False),
        ("dp2:zero3", True, True),
        ("dp2:zero3 precision:bf16", True, False),
        ("dp2:zero3 precision:bf16", False, False),
        ("dp2:zero1 precision:bf16", False, False),
        ("dp2:zero2 precision:bf16", False, False),
        ("dp4:zero3,replicate2 precision:bf16", True, False),
    ],
)
def test_a_bad_shard_is_named_for_the_rank_that_keeps_it(
    plan: str, is_stored: bool, is_frozen: bool, later: bool
) -> None:
    """All ranks see it in their weights, once they have gathered it.

    Rounded parameters are made again from the masters behind each update, also behind one that
    changes nothing. So where the device decides, damage to them has passed before the host hears.
    """
    is_mended = later and is_stored and not is_frozen
    ranks = 4 if "dp4" in plan else 2
    told = threaded(ranks, with_a_bad_shard, plan, is_stored, is_frozen, later, plan=plan)
    for (finding,) in told:
        if is_mended:
            assert finding.cause.startswith("passing: ")
            continue
        assert (finding.rank, finding.details["module"]) == (ranks - 1, "layers.1")
        assert finding.cause == "weight: 1 elements of layers.1.weight are no finite numbers"


def with_a_passing_fault(world: World, later: bool) -> Any:
    engine, said = engine_of(world, "dp2 mb2", later=later, on_nan="skip")
    left = [2]

    def damage(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        left[0] -= 1
        return output * float("inf") if left[0] == 0 else output

    if world.rank == 1:
        engine.model.get_submodule("layers.1").register_forward_hook(damage)
    before = [shard.values.clone() for shard in engine.local_parameters()]
    result = engine.step(batch_of(world))
    after = [shard.values for shard in engine.local_parameters()]
    assert result.skipped
    assert all(torch.equal(*pair) for pair in zip(after, before, strict=True))
    return said


@DECIDED
def test_a_passing_fault_is_told_from_a_lasting_one(later: bool) -> None:
    for (finding,) in threaded(2, with_a_passing_fault, later):
        assert finding.rank == 1
        assert finding.cause.startswith("passing: ")
        assert finding.where == "micro-batch 1"


def with_a_spike(world: World, factor: float | None, later: bool) -> Any:
    engine, said = engine_of(world, "dp2 mb2", later=later, on_nan="skip", spike_factor=factor)
    inputs, targets = batch_of(world)
    for _ in range(4):
        engine.step((inputs, targets))
    loud = inputs.clone()
    if world.rank == 1:
        loud[2:] *= 1e4
    skipped = engine.step((loud, targets)).skipped
    engine.settle()
    return skipped, said


@DECIDED
@pytest.mark.parametrize("factor", [None, 5.0])
def test_a_spike_is_named_and_dropped_where_that_is_asked_for(
    factor: float | None, later: bool
) -> None:
    for skipped, (finding,) in threaded(2, with_a_spike, factor, later):
        assert skipped == (factor is not None)
        assert (finding.kind, finding.rank, finding.step) == ("spike", 1, 5)
        assert finding.details["micro_batch"] == 1


def with_a_loud_head(world: World, schedule: str, later: bool) -> list[RunFinding]:
    engine, said = engine_of(world, f"pp2:{schedule} mb2", later=later)
    for _ in range(4):
        engine.step(batch_of(world))
    if world.rank == 1:
        with torch.no_grad():
            list(engine.model.parameters())[-2].mul_(1e3)
    engine.step(batch_of(world))
    engine.settle()
    return said


@DECIDED
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_spike_of_the_last_stage_is_not_that_of_the_one_before(
    schedule: str, later: bool
) -> None:
    plan = f"pp2:{schedule} mb2"
    for (finding,) in threaded(2, with_a_loud_head, schedule, later, plan=plan):
        assert (finding.kind, finding.rank, finding.step) == ("spike", 1, 5)


def test_ranks_that_do_not_step_together_cannot_skip() -> None:
    with pytest.raises(NotAvailable, match="do not step together"):
        build(
            Net(),
            "dp2:local,every2",
            loss=squared,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            options=Options(on_nan="skip"),
        )
