"""Checkpoints behind a run's back: whole, in time, and no end of the run where one fails."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.checkpoint import Checkpoint, behind, previous
from plait.checkpoint.folder import is_whole, newest_whole
from plait.comm import World
from plait.datasets.loader import Loader
from plait.engine.build import build
from plait.engine.engine import Engine
from plait.mesh import Shard
from plait.run.checkpoints import Checkpoints
from plait.run.hooks import Hook, RunStart, StepDone
from plait.run.loop import fit
from plait.run.rundir import RunFolder
from tests.helpers.threaded import threaded

NET = nn.Linear(4, 4)
SAMPLES = [(torch.randn(4), torch.randn(4)) for _ in range(24)]


def engine_of(world: World) -> Engine:
    return build(
        copy.deepcopy(NET),
        "dp2:zero1",
        loss=lambda output, target: (output - target).square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        world=world,
    )


class Values(Hook):
    """The sum of the parameters after each step, of rank 0."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_start(self, start: RunStart) -> None:
        self._engine = start.engine

    def on_step(self, done: StepDone) -> None:
        self.by_step[done.step] = float(self._engine.model.get_parameter("weight").detach().sum())


def trained(world: World, folder: Path, steps: int, keep: int = 0) -> Any:
    engine = engine_of(world)
    loader = Loader(SAMPLES, 8, dp_size=2, dp_rank=world.rank)
    values = Values()
    checkpoints = Checkpoints(RunFolder(folder), every=1, keep=keep)
    fit(engine, loader, steps, [values, checkpoints])
    return values.by_step, checkpoints.numbers()["checkpoints"]


def test_each_step_is_saved_whole_and_the_last_is_awaited(tmp_path: Path) -> None:
    (values, waited), _ = threaded(2, trained, tmp_path, 4)
    saved = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert [path.name for path in saved] == [f"step-{step:08d}" for step in (1, 2, 3, 4)]
    for step, path in enumerate(saved, 1):
        checkpoint = Checkpoint.open(path)
        checkpoint.verify()
        assert checkpoint.meta["step"] == step
        assert float(checkpoint.tensor("weight").sum()) == pytest.approx(values[step], abs=1e-6)
        assert {one.suffix for one in path.iterdir()} == {".safetensors", ".json"}
    assert waited["count"] == 4 and waited["seconds"] > 0


def test_the_newest_are_kept(tmp_path: Path) -> None:
    threaded(2, trained, tmp_path, 4, 2)
    saved = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert [path.name for path in saved] == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("step", [2, 3])
def test_a_save_that_fails_is_one_line(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = behind.write_own_file

    def failing(prepared: Any, *words: Any) -> Any:
        if prepared.rank == 1 and prepared.meta["step"] == step:
            raise OSError("no space left on device")
        return write(prepared, *words)

    monkeypatch.setattr(behind, "write_own_file", failing)
    threaded(2, trained, tmp_path, 3)
    lines = [line for line in capsys.readouterr().err.splitlines() if "no space" in line]
    path = tmp_path / "checkpoints" / f"step-{step:08d}"
    why = "was not saved, and the run goes on: rank 1: no space left on device"
    assert lines == [f"plait: {path} {why}"]
    assert newest_whole(tmp_path).name == "step-00000003"  # the last is saved again
    names = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert f"step-{1:08d}" in names
    assert (f"step-{2:08d}" in names) == (step != 2)
    assert not any(".tmp" in name for name in names)


def test_a_save_that_is_cut_off_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = threading.Event()
    go = threading.Event()
    complete = behind.complete

    def late(prepared: Any, written: Any) -> None:
        if prepared.meta["step"] == 2:
            reached.set()
            assert go.wait(60)
        complete(prepared, written)

    monkeypatch.setattr(behind, "complete", late)

    def run(world: World) -> None:
        engine = engine_of(world)
        loader = Loader(SAMPLES, 8, dp_size=2, dp_rank=world.rank)
        checkpoints = Checkpoints(RunFolder(tmp_path), every=1)
        checkpoints.on_start(RunStart(engine, loader, 1, 9))
        for _ in range(2):
            result = engine.step(next(loader))
            checkpoints.on_step(StepDone(engine.step_index, 0.1, result))
        if world.rank == 0:
            assert reached.wait(60)
            newest = newest_whole(tmp_path)
            assert newest.name == "step-00000001" and is_whole(newest)
            behind.set_aside(newest.parent)
            go.set()
        checkpoints._await()
        world.axis("world").barrier()
        assert newest_whole(tmp_path).name == "step-00000001"

    threaded(2, run)
    assert json.loads((tmp_path / "checkpoints" / "step-00000001" / "checkpoint.json").read_text())
    assert previous(tmp_path / "checkpoints" / "step-00000001") is None


def test_no_rank_sends_another_anything_for_a_save(tmp_path: Path) -> None:
    def run(world: World) -> None:
        engine = engine_of(world)
        loader = Loader(SAMPLES, 8, dp_size=2, dp_rank=world.rank)
        saves = Checkpoints(RunFolder(tmp_path), every=1, is_beside=True)
        saves.on_start(RunStart(engine, loader, 1, 9))
        flight = world.recorder.flight
        for _ in range(3):
            result = engine.step(next(loader))
            before = flight._num_entries
            saves.on_step(StepDone(engine.step_index, 0.1, result))
            saves._await()
            assert flight._num_entries == before
        saves._wait_for_saves()

    threaded(2, run)
    saved = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert len(saved) == 3 and all(map(is_whole, saved))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_begin_ends_the_save_on_all(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of them waits for it: the limit of such waits is never reached."""
    make = behind.BackgroundSave._make_folder

    def failing(save: behind.BackgroundSave) -> None:
        if save._wanted.rank == rank and save._wanted.meta["step"] == 2:
            raise OSError("the disk is gone")
        make(save)

    monkeypatch.setattr(behind.BackgroundSave, "_make_folder", failing)
    threaded(2, trained, tmp_path, 3)
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if "not saved" in line]
    why = "the disk is gone" if rank == 0 else "given up"
    assert len(lines) == 1 and why in lines[0]
    path = tmp_path / "checkpoints" / "step-00000002"
    assert lines[0].startswith(f"plait: {path} was not saved")
    own = f"plait: rank 1 could not write its part of {path}: the disk is gone"
    assert [line for line in said if "its part" in line] == [own] * rank
    names = [path.name for path in sorted((tmp_path / "checkpoints").glob("step-*"))]
    assert names == ["step-00000001", "step-00000003"]


def test_a_save_whose_generation_is_over_comes_to_nothing(tmp_path: Path) -> None:
    memory = behind.SaveMemory()
    final = tmp_path / "step-1"
    wanted = behind.Wanted(final, "0" * 12, [Shard.whole("w", torch.ones(3))], {}, 1, 2)
    save = behind.BackgroundSave(wanted, lambda: None, memory)
    del memory
    save.wait()
    assert save.failure == "the save was given up"
    behind.remove_tombstones(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_saves_share_a_thread_that_ends_with_their_memory(tmp_path: Path) -> None:
    """A step that starts a thread waits until this has had its first turn."""
    of_others = set(threads_of_saves())
    memory = behind.SaveMemory()
    begun = set(threads_of_saves())
    for number in range(2):
        shards = [Shard.whole("w", torch.ones(3))]
        wanted = behind.Wanted(tmp_path / f"step-{number}", f"{number:012}", shards, {}, 0, 1)
        save = behind.BackgroundSave(wanted, lambda: None, memory)
        assert set(threads_of_saves()) - begun == set()
        save.wait()
        assert save.failure is None
        assert save.processor_seconds > 0.0
    del memory
    (thread,) = begun - of_others
    thread.join(60)
    assert not thread.is_alive()


def threads_of_saves() -> list[threading.Thread]:
    """The threads that write checkpoints."""
    return [thread for thread in threading.enumerate() if thread.name == "plait-checkpoint"]
