"""Sources that a run goes on from: a snapshot in memory, else a checkpoint, else its start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.comm import World
    from plait.config.sections import Recovery
    from plait.run.assemble import Training
    from plait.run.host_snapshots import HostSnapshots
    from plait.run.place import RankContext
    from plait.run.rundir import RunFolder


def newest_of_run(world: World, folder: RunFolder | None, began: float) -> Path | None:
    """The newest whole checkpoint that the run has saved since it began; None for none.

    Rank 0 looks, since another checkpoint may be published meanwhile. Collective.
    """
    newest = None
    if world.rank == 0 and folder is not None:
        newest = _own_checkpoint(folder, began)
    told: Path | None = world.axis("world").gather_objects(newest)[0]
    return told


def _own_checkpoint(folder: RunFolder, began: float) -> Path | None:
    from plait.checkpoint.folder import INDEX, newest_whole

    if not folder.has_whole_checkpoint:
        return None
    newest = newest_whole(folder.path)
    is_own = (newest / INDEX).stat().st_mtime >= began
    return newest if is_own else None


def snapshots_of_host(
    recovery: Recovery, checkpoint: Path | None, world: World
) -> HostSnapshots | None:
    """The snapshots of a run whose ranks torchrun starts again; None where none are taken.

    Collective.
    """
    from plait.run.host_snapshots import host_snapshots

    every = recovery.steps_between_snapshots
    goes_back = recovery.on_nan == "back"
    if not every:
        return None
    return host_snapshots(world, every, lambda: _step_of(checkpoint), goes_back=goes_back)


def _step_of(checkpoint: Path | None) -> int:
    from plait.checkpoint import Checkpoint

    return -1 if checkpoint is None else int(Checkpoint.open(checkpoint).meta["step"])


def load(
    checkpoint: Path | None,
    training: Training,
    place: RankContext | None,
    memory: HostSnapshots | None,
) -> str:
    """The source's name in a recovery, once the state to go on from is taken. Collective."""
    engine = training.engine
    if engine.step_index:  # it was brought in by ranks that go on from it
        return "snapshot"
    source = "snapshot"
    meta = None if place is None else place.restore(engine)
    if meta is None and memory is not None:
        meta = memory.restore(engine)
        source = memory.source
    if meta is None and checkpoint is not None:
        meta = engine.load(checkpoint)
        source = "checkpoint"
    if meta is None:
        return "start"
    training.loader.load_state_dict(meta.get("loader", {}), meta["step"])
    return source
