"""A flipped bit of a replica is found, and whose it is."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.doctor.findings import RunFinding
from plait.engine.build import build
from plait.engine.state import snapshots
from plait.errors import RunError
from plait.launcher.board import Files
from plait.run import replica_replay
from plait.run.bit_sums import Marks, mark
from plait.run.loop import fit
from plait.run.replica_replay import FirstDifference, MarksByStep, first_difference, judged
from plait.run.replicas import CompareReplicas, ReplicaSums, damaged
from tests.helpers.threaded import threaded

NET = nn.Linear(4, 4)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(world: World, plan: str, flips: bool) -> Any:
    net = nn.Linear(4, 4)
    net.load_state_dict(NET.state_dict())
    engine = build(
        net,
        plan,
        loss=squared,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    said: list[RunFinding] = []

    def flip(module: nn.Module, args: Any) -> None:
        if engine.step_index == 2 and flips and world.rank == 1:
            with torch.no_grad():
                net.weight.view(-1).view(torch.int32)[5] ^= 1 << 9

    net.register_forward_pre_hook(flip)
    batches = [(torch.randn(2, 4), torch.randn(2, 4))] * 6
    hook = CompareReplicas(3, said.append)
    if not flips:
        fit(engine, batches, 6, [hook])
        return said
    with pytest.raises(RunError, match=r"corruption: rank 1 in step 3, parameter weight"):
        fit(engine, batches, 6, [hook])
    return said


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero1", "dp3"])
def test_a_flipped_bit_is_found_at_the_next_comparison(plan: str) -> None:
    size = int(plan[2])
    told = threaded(size, train, plan, True, plan=plan)
    assert [finding.rank for finding in told[0]] == [1]


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero1", "dp2:zero3"])
def test_healthy_replicas_say_nothing(plan: str) -> None:
    assert threaded(2, train, plan, False, plan=plan) == [[], []]


class Batches:
    """Six batches, the same on every rank, that can be read again from any step."""

    def __init__(self, device: str = "cpu") -> None:
        made = torch.Generator().manual_seed(3)
        drawn = [torch.randn(2, 2, 4, generator=made).to(device) for _ in range(6)]
        self._batches = [(inputs, targets) for inputs, targets in drawn]
        self._step = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches[self._step :])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        self._step = step


def train_with_a_wrong_update(
    world: World, plan: str, wrong: dict[int, set[int]], every: int, device: str = "cpu"
) -> tuple[list[RunFinding], str]:
    """The updates of these steps get a bit wrong on a rank, once; with 0 among them, each time."""
    net: nn.Module = copy.deepcopy(NET)
    if "pp" in plan:
        net = nn.Sequential(net, copy.deepcopy(NET))
    left = wrong.get(world.rank, set()).copy()
    lasts = 0 in left

    class WrongAdam(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            step = engine.step_index + 1
            if step in left:
                if not lasts:
                    left.remove(step)
                with torch.no_grad():
                    self.param_groups[0]["params"][0].view(-1).view(torch.int32)[2] ^= 1 << 9

    engine = build(
        net.to(device),
        plan,
        loss=squared,
        optimizer=lambda params: WrongAdam(params, lr=0.1),
        world=world,
    )
    said: list[RunFinding] = []
    with pytest.raises(RunError, match="corruption") as caught:
        fit(engine, Batches(device), 6, [CompareReplicas(every, said.append)])
    return said, str(caught.value)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_wrong_update_of_two_is_told_by_a_replay(step: int, every: int) -> None:
    for rank in range(2):
        told = threaded(2, train_with_a_wrong_update, "dp2", {rank: {step}}, every, plan="dp2")
        ((found,), message), (nothing, same) = told
        assert (found.rank, found.step, found.where) == (rank, step, "parameter weight")
        assert found.details["replayed_from"] == last_equal(step, every)
        assert f"gives other bits, and that of ranks [{1 - rank}] the same again" in message
        assert (nothing, same) == ([], message)


@pytest.mark.parametrize("plan", ["dp2", "pp2:gpipe dp2 mb2"])
def test_a_replay_reads_nothing_of_another_machine(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the ranks are a machine of their own. What it restores was made there."""
    size = 2 if plan == "dp2" else 4
    made: dict[Path, str] = {}
    read: list[str] = []
    make, restore = Files.make, snapshots.restore

    def machine() -> str:
        rank = int(threading.current_thread().name.removeprefix("rank "))
        return f"machine {rank * 2 // size}"

    def made_here(files: Files) -> Path:
        path = make(files)
        made[path] = machine()
        return path

    def restored(engine: Any, paths: Sequence[Path]) -> Any:
        read.extend(f"{machine()} reads {made[path]}" for path in paths)
        return restore(engine, paths)

    monkeypatch.setattr(replica_replay, "machine", machine)
    monkeypatch.setattr(replica_replay, "BLOCK_BYTES", 64)
    monkeypatch.setattr(Files, "make", made_here)
    monkeypatch.setattr(snapshots, "restore", restored)
    wrong = size // 2
    told = threaded(size, train_with_a_wrong_update, plan, {wrong: {4}}, 2, plan=plan)
    ((found,), message), *_ = told
    assert (found.rank, found.step) == (wrong, 4)
    assert "gives other bits" in message
    each = size * size // 2
    assert (
        sorted(read) == ["machine 0 reads machine 0"] * each + ["machine 1 reads machine 1"] * each
    )


def test_a_machine_without_room_for_the_others_has_no_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_replay, "machine", lambda: threading.current_thread().name)
    monkeypatch.setattr(replica_replay, "free_memory_bytes", lambda: 100)
    told = threaded(2, train_with_a_wrong_update, "dp2", {1: {4}}, 2, plan="dp2")
    ((found,), message), *_ = told
    assert found.rank is None
    assert "none is the odd one" in message
    assert "replay" not in message
    assert replica_replay.have_room("aab", [3, 4, 5], [15, 15, 12])
    assert not replica_replay.have_room("aab", [3, 4, 5], [15, 15, 11])
    assert not replica_replay.have_room("aab", [3, 4, 5], [14, None, 12])
    assert replica_replay.have_room("aab", [3, 4, 5], [None, 15, None])


def last_equal(step: int, every: int) -> int:
    """The last step before this one whose state was found equal, by the comparison after it."""
    return max(0, step // every * every - 1)


def test_a_lasting_fault_and_one_of_both_have_no_name() -> None:
    lasting = threaded(2, train_with_a_wrong_update, "dp2", {1: {0, 2}}, 2, plan="dp2")
    ((found,), _), _ = lasting
    assert (found.rank, found.step) == (None, 2)
    assert "the same bits again on each of them: the fault is lasting" in found.cause


def test_steps_that_are_not_the_same_again_name_none() -> None:
    place = ("weight", None, 0, 4)
    found = FirstDifference(3, place, (0, 1))
    assert judged(found, [True, True], 1).rank is None
    assert "train.deterministic" in judged(found, [True, True], 1).how
    assert judged(found, [False, True], 1).rank == 1


def test_the_first_difference_is_that_of_the_first_step() -> None:
    place, other = ("weight", None, 0, 4), ("bias", None, 0, 1)
    ranks = [MarksByStep((place, other)), MarksByStep((other, place)), MarksByStep(())]
    for step in range(4):
        ranks[0].note(step, {place: step, other: 7})
        ranks[1].note(step, {place: step + (step == 2), other: 7})
        ranks[2].note(step, {})
    assert first_difference(ranks) == FirstDifference(2, place, (0, 1))
    del ranks[1].steps[2]
    assert first_difference(ranks) is None


def report(value: int, changed: bool = False) -> ReplicaSums:
    place = ("weight", None, 0, 4)
    marks: Marks = {place: value}
    return ReplicaSums(marks, frozenset({place} if changed else ()))


def test_the_odd_one_of_three_is_at_fault_and_of_two_the_one_that_changed() -> None:
    found = damaged([report(1), report(1), report(2)], 4)
    assert found is not None
    assert (found.rank, found.step) == (2, 4)
    found = damaged([report(1, changed=True), report(2)], 4)
    assert found is not None
    assert found.rank == 0
    found = damaged([report(1), report(2)], 4)
    assert found is not None
    assert found.rank is None
    assert damaged([report(1), report(1)], 4) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_mark_differs_with_every_bit(dtype: torch.dtype) -> None:
    values = torch.ones(3, dtype=dtype)
    whole = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    before = mark(values)
    for bit in range(8 * dtype.itemsize - 1):
        whole[1] ^= 1 << bit
        assert mark(values) != before
        whole[1] ^= 1 << bit
