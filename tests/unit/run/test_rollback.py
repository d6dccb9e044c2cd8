"""`on_nan = "back"`: a step that is no number is replayed from the last state, once."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.config.sections import Recovery
from plait.datasets.loader import Loader
from plait.doctor.findings import RunFinding
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.state.snapshots import Snapshots
from plait.errors import NonFiniteLoss, NotAvailable
from plait.run.checkpoints import Checkpoints
from plait.run.hooks import Hook, RunStart, StepDone
from plait.run.host_snapshots import HostSnapshots
from plait.run.loop import fit
from plait.run.metrics import MetricsFile, Tally
from plait.run.replicas import CompareReplicas
from plait.run.restarts import recoveries_of
from plait.run.rollback import Rollback
from plait.run.rundir import RunFolder
from tests.helpers.threaded import threaded

STEPS = 5
NET = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
SAMPLES = [(torch.randn(4), torch.randn(4)) for _ in range(24)]


class InMemory(Hook):
    """Takes a snapshot before the first step and after each other one."""

    def __init__(self, files: tuple[tuple[Path, ...], ...], rank: int) -> None:
        self.place = SimpleNamespace(assignment=SimpleNamespace(parts=files))
        self._files = files[rank]

    def on_start(self, start: RunStart) -> None:
        self._start = start
        self._snapshots = Snapshots(self._files, start.engine)
        self._take(start.engine.step_index)

    def on_step(self, done: StepDone) -> None:
        if done.step % 2 == 0:
            self._take(done.step)

    def _take(self, step: int) -> None:
        meta = {"loader": self._start.loader.state_dict()}
        self._snapshots.take(step // 2, meta)


class HeldHere:
    """The files of a machine, as its process holds them: by name, in a folder."""

    host = "here"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ask(self, make: Sequence[str] = (), drop: Sequence[str] = ()) -> dict[str, Path]:
        for name in make:
            (self._folder / name.replace("/", "~")).touch()
        for name in drop:
            (self._folder / name.replace("/", "~")).unlink()
        return {path.name.replace("~", "/"): path for path in self._folder.glob("*~*")}


def damage(engine: Engine, rank: int, step: int, times: int) -> None:
    """Have a weight of one rank be no number in a step, so many times; only a load mends it."""
    left = [times]

    def spoil(module: nn.Module, args: Any) -> None:
        if engine.world.rank == rank and engine.step_index == step - 1 and left[0]:
            left[0] -= 1
            with torch.no_grad():
                engine.strategy.pieces[0].value.view(-1)[0] = float("nan")

    engine.model.register_forward_pre_hook(spoil)


def trained(
    world: World, plan: str, folder: Path, where: str, times: int, later: bool = False
) -> tuple[list[Tensor], list[RunFinding], list[dict[str, Any]], Tally]:
    engine = build(
        copy.deepcopy(NET),
        plan,
        loss=lambda output, target: (output - target).square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        world=world,
        options=Options(on_nan="back", defer_reads=later),
    )
    said: list[RunFinding] = []
    engine.guard.listeners.append(said.append)
    damage(engine, world.size - 1, 4, times)
    loader = Loader(SAMPLES, 8, dp_size=world.worker[1], dp_rank=world.worker[0])
    run = RunFolder(folder)
    tally = Tally()
    hooks: list[Hook] = [tally]
    if not later:  # who looks at replicas has the host decide on steps
        hooks.insert(0, CompareReplicas(1, said.append))
    place: Any = None
    held: Any = HeldHere(folder)
    memory = None
    if where == "launcher":
        files = tuple(
            tuple(folder / f"{rank}-{turn}" for turn in (0, 1)) for rank in range(world.size)
        )
        for path in files[world.rank]:
            path.touch()
        in_memory = InMemory(files, world.rank)
        place = in_memory.place
        hooks.append(in_memory)
    elif where == "machine":
        memory = HostSnapshots(world, held, 2, -1, goes_back=True)
        hooks.append(memory)
    else:
        hooks.append(Checkpoints(run, every=2, saves_start=True))
    if world.rank == 0:
        hooks.append(MetricsFile(run.metrics))
    rollback = Rollback(folder, place, memory)
    try:
        fit(engine, loader, STEPS, [*hooks, rollback], rollback=rollback)
    except NonFiniteLoss as error:
        assert "lasting: a replay from step 2 gives it again" in str(error)
        if world.rank == 0:
            hooks[-1].on_end()
    if memory is not None:
        memory.close()
    values = [shard.values.clone() for shard in engine.local_parameters()]
    return values, said, rollback.recoveries, tally


@pytest.mark.parametrize("plan", ["dp2 mb2", "dp2:zero1", "dp2:zero3"])
@pytest.mark.parametrize("where", ["launcher", "machine", "checkpoints"])
@pytest.mark.parametrize("later", [False, True], ids=["host", "device"])
def test_a_passing_fault_leaves_no_trace(
    plan: str, where: str, later: bool, tmp_path: Path
) -> None:
    (tmp_path / "calm").mkdir()
    calm = threaded(2, trained, plan, tmp_path / "calm", where, 0, later)
    found = threaded(2, trained, plan, tmp_path, where, 1, later)
    for (values, said, recoveries, tally), (expected, nothing, none, undisturbed) in zip(
        found, calm, strict=True
    ):
        assert all(torch.equal(*pair) for pair in zip(values, expected, strict=True))
        assert (nothing, none) == ([], [])
        (finding,) = said
        assert (finding.kind, finding.rank, finding.step) == ("nan", 1, 4)
        assert finding.cause.startswith("passing: a replay from step 2 is finite; ")
        (recovery,) = recoveries
        assert (recovery["step"], recovery["steps_repeated"]) == (3, 1)
        assert recovery["source"] == ("checkpoint" if where == "checkpoints" else "snapshot")
        assert recovery["lost_ranks"] == [] and recovery["seconds"] > 0
        assert tally.losses == undisturbed.losses
        assert tally.traffic() == undisturbed.traffic()
    assert recoveries_of(RunFolder(tmp_path), None) == found[0][2]  # as after a later loss
    assert recoveries_of(RunFolder(tmp_path / "calm"), None) == []
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_a_lasting_fault_ends_the_run_at_its_second_time(tmp_path: Path) -> None:
    for _, said, recoveries, tally in threaded(2, trained, "dp2", tmp_path, "launcher", STEPS):
        (finding,) = said
        assert finding.cause.startswith("lasting: a replay from step 2 gives it again; weight")
        assert finding.details["replayed_from"] == 2
        assert len(recoveries) == 1
        assert tally.last_step == 3


def test_a_loop_that_does_not_go_back_is_told(tmp_path: Path) -> None:
    def careless(world: World) -> None:
        engine = build(
            copy.deepcopy(NET),
            "dp1",
            loss=lambda output, target: (output - target).square().mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            world=world,
            options=Options(on_nan="back"),
        )
        batch = torch.full((2, 4), float("nan")), torch.zeros(2, 4)
        assert engine.step(batch).skipped
        with pytest.raises(NotAvailable, match="load an earlier state"):
            engine.step(batch)

    threaded(1, careless)


def test_a_run_that_may_go_back_takes_snapshots() -> None:
    recovery = Recovery(on_nan="back")
    assert recovery.steps_between_snapshots == 1
    assert not recovery.goes_on
