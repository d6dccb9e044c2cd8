"""What ranks do in `test_coming_and_going`: functions that a new process can import. Rank `DIES` is
killed and comes back.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint import Checkpoint
from plait.comm import World
from plait.engine.build import Options, build, join_world
from plait.engine.engine import Engine
from plait.models import losses
from plait.outer import AsyncServerDriver, LocalDriver
from plait.plan import Plan
from plait.run.checkpoints import Checkpoints
from plait.run.loop import fit
from plait.run.rundir import RunFolder
from tests.parity.families import FAMILIES
from tests.parity.harness import SEED
from tests.parity.replay import Recorded
from tests.parity.test_local import sgd, shares

DIES = 1
AT_STEP = 7
AFTERWARDS = 6
LIMIT = 100_000
PAUSE_SECONDS = 0.01
Weights = list[tuple[str, tuple[int, ...], Any, Tensor]]


class Batches:
    """One rank's batches, without end."""

    def __init__(self, rank: int, size: int) -> None:
        self._own = shares(FAMILIES["mlp"], size)[rank]

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        return self._own[step % len(self._own)]


def engine_of(world: World, plan: str, options: Options) -> Engine:
    return build(
        FAMILIES["mlp"].model(),
        plan,
        loss=losses.cross_entropy,
        optimizer=sgd,
        options=options,
        world=world,
    )


def weights_of(engine: Engine) -> Weights:
    return [
        (p.name, p.global_shape, p.index(), p.values.clone()) for p in engine.local_parameters()
    ]


def dies_once(folder: str) -> None:
    """Be killed, in the first life."""
    mark = Path(folder) / "died"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_outer_step(driver: LocalDriver, folder: str) -> None:
    """Be killed when the others wait for this rank's share of the sum, in the round of
    `AT_STEP`.
    """
    give = driver._sum
    calls = iter(range(LIMIT))

    def die(differences: list[Tensor]) -> None:
        if next(calls) == AT_STEP // driver._options.every:
            dies_once(folder)
        give(differences)

    driver._sum = die  # type: ignore[method-assign]


def local(plan: str, folder: str, options: dict[str, Any], in_outer_step: bool = False) -> Any:
    """(the first step of this life, the steps after which ranks had come or gone, weights). All end
    at the same step.

    When one is lost the others make no step before it lives again, and then meet it: how long that
    takes does not matter.
    """
    world = join_world(Plan.parse(plan))
    membership = world.membership
    assert membership is not None
    if (Path(folder) / "died").exists():
        membership.announce()
        membership.set_word("alive", "")
    engine = engine_of(world, plan, Options(seed=SEED, **options))
    worker, size = world.worker
    if worker == DIES and in_outer_step:
        assert isinstance(engine.driver, LocalDriver)
        dies_in_outer_step(engine.driver, folder)
    batches = Batches(worker, size)
    first = engine.step_index
    changes = []
    last = LIMIT
    if first:
        last = first + AFTERWARDS
    while engine.step_index < last:
        if worker == DIES and engine.step_index == AT_STEP and not in_outer_step:
            dies_once(folder)
        before = world.size
        engine.step(batches[engine.step_index], trace=False)
        if world.size != before:
            changes.append((engine.step_index, world.size))
        if world.size < before:
            membership.wait_for_word("alive")
        if world.size > before:
            last = engine.step_index + AFTERWARDS
    engine.driver.synchronize()
    weights = weights_of(engine)
    world.close()
    return first, changes, weights


def saving(plan: str, folder: str) -> Any:
    """(the rank, whether it has died and come back, the world's size). Rank `DIES` is killed in its
    first save, after it has written and before all have heard.
    """
    from plait.checkpoint import write

    world = join_world(Plan.parse(plan))
    assert world.membership is not None
    membership = world.membership
    is_back = (Path(folder) / "died").exists()
    if is_back:
        membership.announce()
        membership.set_word("alive", "")
    engine = engine_of(world, plan, Options(seed=SEED))
    worker, size = world.worker
    batches = Batches(worker, size)
    if worker == DIES and not is_back:
        complete = write._write_file

        def die_after_writing(*args: Any) -> Any:
            complete(*args)
            dies_once(folder)

        write._write_file = die_after_writing
    while engine.step_index < AT_STEP + AFTERWARDS:
        engine.step(batches[engine.step_index], trace=False)
        if engine.step_index == AT_STEP:
            engine.save(Path(folder) / f"step-{AT_STEP:08d}")
            if worker != DIES:
                membership.wait_for_word("alive")
    world.together(world.barrier)
    found = (worker, is_back, world.size)
    world.close()
    return found


class EndlessBatches:
    """One rank's batches for `fit`, from the engine's step on."""

    def __init__(self, engine: Engine, meets: Callable[[], None]) -> None:
        worker, size = engine.world.worker
        self._batches = Batches(worker, size)
        self._engine = engine
        self._meets = meets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self._meets()
            yield self._batches[self._engine.step_index]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._engine.step_index}


def joins_at_a_save(plan: str, folder: str) -> Any:
    """(the rank, the first step of this life, the world's size at the end). Every outer step is
    followed by a save, so the rank that comes back joins the others at a step that they save.
    """
    world = join_world(Plan.parse(plan))
    membership = world.membership
    assert membership is not None
    if (Path(folder) / "died").exists():
        membership.announce()
        membership.set_word("alive", "")
    engine = engine_of(world, plan, Options(seed=SEED))
    worker, size = world.worker
    first = engine.step_index

    def meets() -> None:
        if worker == DIES and engine.step_index == AT_STEP:
            dies_once(folder)
        if world.size < size:
            membership.wait_for_word("alive")

    saves = Checkpoints(RunFolder(Path(folder) / "run"), every=2)
    fit(engine, EndlessBatches(engine, meets), AT_STEP + AFTERWARDS, [saves])
    found = (worker, first > 0, world.size)
    world.close()
    return found


def saves_apart(plan: str, folder: str) -> Any:
    """The steps of the checkpoints that a rank finds. Rank 1 leaves out the first save of two, as a
    rank does that comes back at a later step than the others are at.
    """
    world = join_world(Plan.parse(plan))
    engine = engine_of(world, plan, Options(seed=SEED, num_servers=1))
    worker, size = world.worker
    batches = Batches(worker, size)
    saves = (2, 4) if worker == 0 else (4,)
    while engine.step_index < saves[-1]:
        engine.step(batches[engine.step_index], trace=False)
        if engine.step_index in saves:
            engine.save(Path(folder) / f"step-{engine.step_index}")
    world.together(world.barrier)
    found = [Checkpoint.open(path).meta["step"] for path in sorted(Path(folder).glob("step-*"))]
    world.close()
    return found


def served(plan: str, folder: str) -> Any:
    """(the steps of this life, the record of the server, weights). Rank 0 serves; each goes on
    until the lost one is back.
    """
    world = join_world(Plan.parse(plan))
    membership = world.membership
    assert membership is not None
    engine = engine_of(world, plan, Options(seed=SEED, num_servers=1))
    driver = engine.driver
    assert isinstance(driver, AsyncServerDriver)
    if driver.server is not None:
        driver.server.log = []
        membership.set_word("recording", "")
    membership.wait_for_word("recording")
    batches = Batches(*world.worker)
    steps = []
    last = LIMIT
    if engine.step_index:
        membership.set_word("back", "")
    while engine.step_index < last:
        if membership.worker == DIES and engine.step_index == AT_STEP:
            dies_once(folder)
        steps.append(engine.step_index)
        engine.step(batches[engine.step_index], trace=False)
        if last == LIMIT and membership.has_word("back"):
            last = engine.step_index + AFTERWARDS
        elif last == LIMIT and membership.worker != DIES:
            time.sleep(PAUSE_SECONDS)  # so that there is less to be replayed
    driver.synchronize()
    record = None
    if driver.server is not None:
        record = Recorded(
            tuple(dict.fromkeys(p.name for p in engine.strategy.pieces)),
            tuple(driver.server.log or ()),
        )
    weights = weights_of(engine)
    met = world.size
    world.close()
    return steps, record, weights, met
