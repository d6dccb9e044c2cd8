"""Copies of a state beside the next step: of the state that they are asked for, and in time."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.checkpoint import Checkpoint, behind
from plait.checkpoint.behind import BackgroundSave
from plait.checkpoint.memory import MemoryCheckpoint
from plait.checkpoint.room import Room
from plait.checkpoint.write import Prepared, prepare
from plait.comm import World
from plait.datasets.loader import Loader
from plait.engine.build import build
from plait.engine.engine import Engine
from plait.engine.state import listed
from plait.engine.state.saves_behind import SavesBehind
from plait.engine.state.saving import lasting_shards_of, meta_of, shards_of
from plait.engine.state.snapshots import Snapshots
from plait.run.checkpoints import Checkpoints
from plait.run.copier import Copier
from plait.run.hooks import RunStart, StepDone
from plait.run.rundir import RunFolder
from tests.helpers.threaded import threaded

NET = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
BATCH = (torch.randn(8, 4), torch.randn(8, 4))
SAMPLES = [(torch.randn(4), torch.randn(4)) for _ in range(24)]


def engine_of(world: World) -> Engine:
    return build(
        copy.deepcopy(NET),
        "dp2:zero1",
        loss=lambda output, target: (output - target).square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        world=world,
    )


def values_of(engine: Engine) -> dict[str, Tensor]:
    return {shard.name: shard.values.clone() for shard in shards_of(engine)}


def test_a_copy_under_way_ends_before_the_gradients_are_summed() -> None:
    """Else a rank could be two steps ahead of the snapshot of another."""

    def run(world: World) -> None:
        engine = engine_of(world)
        order: list[str] = []
        engine.update.totals = told(order, "sum", engine.update.totals)  # type: ignore[method-assign]
        engine.model.register_forward_hook(lambda *_: order.append("forward"))
        for _ in range(2):
            engine.copies.add(lambda: order.append("copied"))
            engine.step(BATCH)
        assert order == ["forward", "copied", "sum"] * 2

    threaded(2, run)


def told(order: list[str], word: str, act: Any) -> Any:
    def acting(*args: Any, **named: Any) -> Any:
        order.append(word)
        return act(*args, **named)

    return acting


def test_a_snapshot_beside_a_step_is_of_the_step_before(tmp_path: Path) -> None:
    """The step writes running statistics, and the copy is made only when it must be."""
    files = tuple(tuple(tmp_path / f"{rank}-{turn}" for turn in (0, 1)) for rank in range(2))
    for path in (path for own in files for path in own):
        path.touch()

    def run(world: World) -> None:
        engine = engine_of(world)
        snapshots = Snapshots(files[world.rank], engine)
        for step in (1, 2, 3):
            engine.step(BATCH)
            expected = values_of(engine)
            engine.copies.add(snapshots.begin(step, {}))
            engine.step(BATCH)
            world.axis("world").barrier()
            paths = [own[step % 2] for own in files]
            kept = MemoryCheckpoint(paths)
            assert kept.meta["step"] == 2 * step - 1
            for shard in shards_of(engine):
                whole = kept.tensor(shard.name).reshape(-1)
                own = whole[shard.start : shard.stop] if whole.numel() > 1 else whole
                assert torch.equal(own, expected[shard.name]), shard.name
            world.axis("world").barrier()

    threaded(2, run)


def test_shards_are_listed_anew_where_their_memory_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    monkeypatch.setattr(listed, "lasting_shards_of", told(made, "made", lasting_shards_of))

    def run(world: World) -> None:
        engine = engine_of(world)
        shards = listed.ListedShards(engine)
        engine.step(BATCH)
        shards.shards()
        engine.step(BATCH)
        first = shards.shards()
        assert {shard.name: shard.numel for shard in first} == {
            shard.name: shard.numel for shard in shards_of(engine)
        }
        piece = engine.strategy.pieces[0].value
        moment = torch.zeros_like(piece)
        engine.update.optimizer.state[piece]["exp_avg"] = moment
        again = {shard.name: shard for shard in shards.shards()}
        name = f"optimizer/exp_avg/{engine.strategy.pieces[0].name}"
        assert not again[name].values.any()

    threaded(2, run)
    assert len(made) == 2 * 2  # one for each rank at first, and one for each other memory


def test_a_checkpoint_takes_the_list_of_the_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(listed, "lasting_shards_of", told(made, "made", lasting_shards_of))

    def run(world: World) -> None:
        engine = engine_of(world)
        engine.step(BATCH)
        file = tmp_path / f"{world.rank}"
        file.touch()
        Snapshots([file], engine).take(1, {})
        saves = SavesBehind(engine)
        save = saves.begin(tmp_path / "step-1", {}, lambda: None)
        save.wait()
        assert save.failure is None

    threaded(2, run)
    assert len(made) == 2  # one for each rank


def test_a_later_save_walks_through_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without buffers: what no step changes is found once, and the step count each time."""
    walks: list[str] = []
    named_modules = nn.Module.named_modules

    def walking(module: nn.Module, *args: Any, **more: Any) -> Any:
        walks.append(threading.current_thread().name)
        return named_modules(module, *args, **more)

    def run(world: World) -> list[Any]:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        loss = nn.MSELoss()
        engine = build(model, "dp1", loss=loss, optimizer=torch.optim.AdamW, world=world)
        files = [tmp_path / "0", tmp_path / "1"]
        for file in files:
            file.touch()
        snapshots = Snapshots(files, engine)
        saves = SavesBehind(engine)
        found: list[Any] = []
        for step in (1, 2, 3):
            engine.step(BATCH)
            before = len(walks)
            snapshots.take(step, {"loader": {}})
            save = saves.begin(tmp_path / f"step-{step}", {"loader": {}}, lambda: None)
            save.wait()
            assert save.failure is None
            found.append(len(walks) - before)
            meta = {"loader": {}, **meta_of(engine)}
            kept = MemoryCheckpoint([files[step % 2]])
            assert kept.meta == Checkpoint.open(tmp_path / f"step-{step}").meta == meta
            assert meta["step"] == step
        return found

    monkeypatch.setattr(nn.Module, "named_modules", walking)
    (found,) = threaded(1, run)
    assert found[0] > 0
    assert found[1:] == [0, 0]


def test_ranks_that_hold_what_they_held_tell_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tells: dict[int, list[bool]] = {0: [], 1: []}
    agreed: list[Prepared] = []
    leave, complete = BackgroundSave._leave, behind.complete

    def leaving(save: BackgroundSave, what: str, rank: int, text: str) -> None:
        if what == "held":
            tells[rank].append(json.loads(text) is not None)
        leave(save, what, rank, text)

    def completing(prepared: Prepared, written: Any) -> None:
        agreed.append(prepared)
        complete(prepared, written)

    monkeypatch.setattr(BackgroundSave, "_leave", leaving)
    monkeypatch.setattr(behind, "complete", completing)

    def run(world: World) -> None:
        engine = engine_of(world)
        engine.step(BATCH)
        shards = listed.ListedShards(engine)
        saves = SavesBehind(engine)
        gather = world.axis("world").gather_objects
        tensors = []
        for number in range(3):
            if number == 2 and world.rank == 1:  # one rank holds something else
                for piece in engine.strategy.pieces:
                    engine.update.optimizer.state[piece.value]["more"] = torch.tensor(1.0)
            path = tmp_path / f"step-{number}"
            save = saves.begin(path, {}, lambda: None)
            save.wait()
            assert save.failure is None
            form = {"rank": world.rank, "world_size": 2, "gather": gather}
            afresh = prepare(path, shards.shards(), meta_of(engine), **form)
            if world.rank == 0:
                found = agreed[-1]
                assert found.tensors == afresh.tensors
                assert found.token.partition("-")[2] == afresh.token.partition("-")[2]
                tensors.append(set(found.tensors))
        if world.rank == 0:
            assert tensors[0] == tensors[1] < tensors[2]

    threaded(2, run)
    assert tells == {0: [True, False, False], 1: [True, False, True]}


def test_a_checkpoint_beside_a_step_is_of_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy begins late, when the next step is at work; that waits before it sums."""
    at_work = [threading.Event(), threading.Event()]
    copied = Room.copy

    def late(room: Room, shards: Any) -> Any:
        assert all(event.wait(60) for event in at_work)
        return copied(room, shards)

    monkeypatch.setattr(Room, "copy", late)

    def run(world: World) -> Any:
        engine = engine_of(world)
        loader = Loader(SAMPLES, 8, dp_size=2, dp_rank=world.rank)
        saves = Checkpoints(RunFolder(tmp_path), every=1, is_beside=True)
        saves.on_start(RunStart(engine, loader, 1, 2))
        saves.on_step(StepDone(1, 0.1, engine.step(next(loader))))
        expected = values_of(engine)
        engine.model.register_forward_hook(lambda *_: at_work[world.rank].set())
        engine.step(next(loader))
        saves._wait_for_saves()
        world.axis("world").barrier()
        saved = Checkpoint.open(tmp_path / "checkpoints" / "step-00000001")
        for shard in shards_of(engine):
            whole = saved.tensor(shard.name).reshape(-1)
            own = whole[shard.start : shard.stop] if shard.numel > 1 else whole
            assert torch.equal(own, expected[shard.name]), shard.name
        return saves.numbers()["checkpoints"]

    waited, _ = threaded(2, run)
    assert waited["count"] == 1
    assert waited["processor_seconds"] > 0


def test_the_error_of_a_copy_is_raised_where_it_is_awaited() -> None:
    copier = Copier()
    copier.begin(lambda: None)
    assert copier.wait() >= 0
    assert copier.wait() == 0

    def fail() -> None:
        raise MemoryError("no room for a copy")

    copier.begin(fail)
    with pytest.raises(MemoryError, match="no room"):
        copier.wait()
    copier.close()
