"""One training run as its ranks see it: `run` is what every rank calls, with a whole job.

A job is plain data, so that it travels to new processes. It was checked before (see `common`).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from plait.errors import RunError
from plait.run.logs import logged, terminal_of
from plait.run.memory import held_memory_bytes, peak_memory_bytes
from plait.values import JsonMapping, JsonObject

if TYPE_CHECKING:
    from plait.cluster.products import ProductTable
    from plait.comm import World
    from plait.config import Config
    from plait.launcher.board import Page
    from plait.plan import Plan
    from plait.run.assemble import Training
    from plait.run.ending import Ending
    from plait.run.hooks import Hook
    from plait.run.host_snapshots import HostSnapshots
    from plait.run.metrics import Tally
    from plait.run.place import RankContext
    from plait.run.rundir import RunFolder
    from plait.run.watching import Supervision


@dataclass(frozen=True)
class TrainingRun:
    """The training that ranks do, and the folder of its results; without one nothing is written.

    `began` is when the run did, in seconds of the epoch. With `keeps_timeline` rank 0's numbers
    hold the last step of all ranks as `timeline`, which is no JSON, and every step as `course`.
    With `watches_itself` no launcher watches over the ranks.
    """

    config: Config
    plan: str
    folder: Path | None = None
    checkpoint: Path | None = None
    shows_progress: bool = True
    keeps_timeline: bool = False
    watches_itself: bool = False
    profiled_step: int | None = None
    began: float = 0.0
    is_restart: bool = False

    @property
    def supervision(self) -> Supervision:
        """The way in which its ranks are watched over."""
        from plait.run.watching import Supervision

        seconds = self.config.recovery.hang_seconds
        return Supervision(self.plan, seconds, self.folder, self.watches_itself)


def run(
    job: TrainingRun,
    place: RankContext | None = None,
    by_peers: bool = False,
    page: Page | None = None,
) -> JsonObject:
    """Train, and return the numbers of `plait train --json`, the same on every rank. Collective.

    `place` is the part of this rank where a launcher keeps the run alive. With `by_peers` the ranks
    agree among themselves on the end that a signal asks for, with `page` in memory of their
    launcher. A run that ends so has one number, `stopped`: the steps that are done and saved.
    """
    from plait.engine.build import join_world
    from plait.plan import Plan
    from plait.run.ending import EndByPeers, EndOfMembers
    from plait.run.place import closing

    plan = Plan.parse(job.plan)
    listening: EndByPeers | EndOfMembers | None = None
    if by_peers:
        listening = EndByPeers(job.config.recovery.deadline_seconds)
    elif page is not None:
        listening = EndOfMembers(page)
    join = join_world if place is None else place.join
    world = join(plan, job.supervision.silent_seconds, backend=job.config.cluster.backend)
    ending = None if listening is None else listening.of(world)
    numbers: JsonObject = closing(world, partial(_watched, job, world, place, ending))
    if isinstance(listening, EndByPeers):
        listening.linger()
    return numbers


def _watched(
    job: TrainingRun, world: World, place: RankContext | None, ending: Ending | None
) -> JsonObject:
    """The run in a world, watched over where no launcher does. Collective."""
    from plait.run.alike import check_alike
    from plait.run.assemble import shares_between
    from plait.run.sources import newest_of_run, snapshots_of_host

    check_alike(world, job.config, job.plan)
    job, folder = _agreed(world, job)
    if place is not None and not place.is_first:
        newest = newest_of_run(world, folder, job.began)
        job = job if newest is None else replace(job, checkpoint=newest)
    if folder is not None:
        shares = shares_between(job.config.plan, len(world.equal_ranks()))
        world.record_into(folder.doctor, shares)
    log = contextlib.nullcontext() if folder is None else logged(folder.log(world.rank))
    memory = None
    if place is None and job.watches_itself:
        memory = snapshots_of_host(job.config.recovery, job.checkpoint, world)
    kept = contextlib.nullcontext() if memory is None else contextlib.closing(memory)
    with log, job.supervision.inside(folder), kept:
        return _trained(job, world, place, ending, memory)


def _trained(
    job: TrainingRun,
    world: World,
    place: RankContext | None,
    ending: Ending | None,
    memory: HostSnapshots | None,
) -> JsonObject:
    """The run itself. Collective."""
    from plait.doctor.findings import report
    from plait.engine.explain import explained, memory_error
    from plait.plan import Plan
    from plait.run.assemble import assemble, set_torch
    from plait.run.data_numbers import bad_rows
    from plait.run.ending import stopped
    from plait.run.loop import fit
    from plait.run.metrics import Tally
    from plait.run.observing import Observers
    from plait.run.optimizers import rate_of_step
    from plait.run.restarts import recoveries_of
    from plait.run.rollback import Rollback
    from plait.run.rundir import RunFolder
    from plait.run.sources import load
    from plait.run.watch import Watch

    plan = Plan.parse(job.plan)
    folder = None if job.folder is None else RunFolder(job.folder)
    set_torch(job.config.train)
    table = _table(world, job, folder, plan)
    tally = Tally(held_memory_bytes(world.device))
    with explained(memory_error(world.rank, "building the model")):
        training = assemble(job.config, plan, world, table)
    if folder is not None and world.rank == 0:
        training.engine.guard.listeners.append(partial(report, folder.doctor))
    taken = (load(job.checkpoint, training, place, memory), training.engine.step_index)
    again = _begun(folder if world.rank == 0 else None, job, table, taken)
    watch = Watch(_warn if world.rank == 0 else _be_silent)
    steps = job.config.train.steps
    progress = [] if place is None else [place.hook(job.config.recovery)]
    ending = next(iter(progress), ending)
    observers = Observers.of(job.config, job.plan, world, folder, ending)
    beside = _hooks(job, world, folder, training, place, table=table)
    hooks = [tally, watch, *beside, *observers.hooks()]
    rollback = Rollback(job.folder, place, memory)
    hooks += [*progress, *again, rollback, *filter(None, [memory])]

    def ends_before(step: int) -> bool:
        leave = training.engine.driver.leave
        return observers.ends or (ending is not None and ending.ends_before(step, leave))

    fit(
        training.engine,
        training.loader,
        steps,
        hooks,
        ends_before,
        rollback=rollback,
        rate=rate_of_step(job.config.train),
    )
    is_short = training.engine.step_index < steps and not observers.ends
    if ending is not None and (is_short or observers.is_left_off):
        observers.finish()
        return stopped(world, training.engine.step_index, ending, observers.is_left_off)
    recoveries = recoveries_of(folder, place, rollback.recoveries)
    more = {
        "warnings": watch.warnings,
        "recoveries": recoveries,
        "recovery_seconds": sum(one["seconds"] or 0.0 for one in recoveries),
        **observers.numbers(),
        **bad_rows(training.loader.dataset),
    }
    for hook in hooks:
        more.update(hook.numbers())
    result = _ended(job, world, training, tally, more)
    observers.finish()
    if ending is not None and ending.starts_again():
        result = {"stopped": training.engine.step_index, "signal": ending.signal}
    world.close()
    return result


def _ended(
    job: TrainingRun, world: World, training: Training, tally: Tally, more: JsonMapping
) -> JsonObject:
    """The numbers of a run that has done its steps, and `more`, written into its folder."""
    from plait.run.metrics import planned, written_numbers
    from plait.run.rundir import RunFolder
    from plait.trace import Timeline

    folder = None if job.folder is None else RunFolder(job.folder)
    timeline = tally.timelines[-1] if tally.timelines else Timeline(world.rank)
    timelines = []
    if job.keeps_timeline:
        timelines = world.together(lambda: world.axis("world").gather_objects(timeline))
    result = {
        "out": None if folder is None else str(folder.path),
        **world.together(lambda: _numbers(world, training, tally, folder, more["recoveries"])),
        **planned(job.plan, job.config.plan),
        **more,
    }
    if folder is not None and world.rank == 0:
        result |= written_numbers(folder, tally, job.plan)
        if tally.has_news(folder.summary):
            folder.summary.write_text(json.dumps(result, indent=2) + "\n")
    return (
        {**result, "timeline": Timeline.merge(timelines), "course": tally.course}
        if job.keeps_timeline and world.rank == 0
        else result
    )


def _warn(message: str) -> None:
    _say(f"warning: {message}")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _be_silent(message: str) -> None:
    pass


def _agreed(world: World, job: TrainingRun) -> tuple[TrainingRun, RunFolder | None]:
    """The folder and the checkpoint of rank 0: in a world of torchrun it alone has chosen them."""
    from plait.run.rundir import RunFolder

    path, checkpoint = world.axis("world").gather_objects((job.folder, job.checkpoint))[0]
    job = replace(job, folder=path, checkpoint=checkpoint)
    return job, None if path is None else RunFolder(path)


def _begun(
    folder: RunFolder | None, job: TrainingRun, table: ProductTable, source: tuple[str, int]
) -> list[Hook]:
    """Write what was asked for into the folder; the hook that notes a restart, if it is one.

    `source` is what the run goes on from, and the steps that are done there.
    """
    from plait.run.restarts import restarted

    if folder is None:
        return []
    again = restarted(folder, job.plan, *source) if job.is_restart else []
    _describe(folder, job, table)
    return again


def _describe(folder: RunFolder, job: TrainingRun, table: ProductTable) -> None:
    """Write what was asked for into the run's folder."""
    from plait.engine.choosing import write_table_of_run
    from plait.parallel.pipeline.text import dumps
    from plait.plan import Plan
    from plait.run.assemble import make_schedule

    try:
        folder.config.write_text(job.config.to_toml())
        folder.plan.write_text(f"{job.plan}\n")
        write_table_of_run(folder.products, table)
        own = make_schedule(job.config) if Plan.parse(job.plan).pp.size > 1 else None
        if own is not None:
            folder.schedule.write_text(dumps(own))
    except OSError as error:
        raise RunError(f"{folder.path} cannot be written: {error.strerror or error}") from error


def _table(world: World, job: TrainingRun, folder: RunFolder | None, plan: Plan) -> ProductTable:
    """Which library multiplies: the choice of the run that is continued, else this machine's."""
    from plait.engine.choosing import agreed_table
    from plait.engine.precision import Precision
    from plait.run.assemble import product_of
    from plait.run.rundir import RunFolder

    train = job.config.train
    source = folder
    if job.checkpoint is not None and (folder is None or not folder.products.exists()):
        source = RunFolder.of(job.checkpoint)
    compute = Precision.of(plan, float16=train.float16).compute
    run_file = None if source is None else source.products
    return agreed_table(product_of(train), world, compute, run_file)


def _hooks(
    job: TrainingRun,
    world: World,
    folder: RunFolder | None,
    training: Training,
    place: RankContext | None,
    *,
    table: ProductTable,
) -> list[Hook]:
    from plait.doctor.findings import report
    from plait.run.checkpoints import Checkpoints
    from plait.run.costs import WaitedFor
    from plait.run.metrics import MetricsFile
    from plait.run.profile import ProfileStep
    from plait.run.progress import progress
    from plait.run.remarks import Remarks
    from plait.run.replicas import CompareReplicas

    hooks: list[Hook] = [Remarks(job.config.train.global_batch, _say)] if world.rank == 0 else []
    account = WaitedFor if place is None else place.waited_for
    if world.rank == 0 and folder is not None:
        first = training.engine.step_index + 1
        hooks.append(MetricsFile(folder.metrics, first, partial(_describe, folder, job, table)))
    if world.rank == 0 and job.shows_progress:
        hooks.append(progress(terminal_of(sys.stderr)))
    if folder is not None:
        recovery = job.config.recovery
        hooks.append(
            Checkpoints(
                folder,
                job.config.train.checkpoint_every,
                recovery.keep,
                saves_start=recovery.on_nan == "back" and place is None,
                is_beside=recovery.on_nan != "back",
                account=account,
            )
        )
    if folder is not None and job.profiled_step is not None:
        hooks.append(ProfileStep(job.profiled_step, folder.profile(world.rank)))
    every = job.config.recovery.check_replicas_every
    if folder is not None and every:
        hooks.insert(0, CompareReplicas(every, partial(report, folder.doctor)))
    return hooks


def _numbers(
    world: World,
    training: Training,
    tally: Tally,
    folder: RunFolder | None,
    recoveries: list[JsonObject],
) -> JsonObject:
    """The summary over all ranks; rank 0 writes the trace of all into the folder."""
    from plait.run.data_numbers import mark_batches, of_slowest
    from plait.run.metrics import summary
    from plait.trace import Timeline, breakdown
    from plait.trace.chrome import mark_recoveries

    engine = training.engine
    own_numbers = (
        peak_memory_bytes(),
        tally.memory_before,
        tally.traffic(),
        engine.memory(),
        tally.timeline(),
        engine.driver.staleness(),
        tally.waits,
    )
    gathered = zip(
        *world.axis("world").gather_objects((*own_numbers, tally.breakdown())), strict=True
    )
    peaks, before, traffic, states, timelines, ages, waits, parts = map(list, gathered)
    if folder is not None and world.rank == 0 and tally.has_news(folder.trace):
        merged = Timeline.merge(timelines)
        trace = merged.to_chrome()
        mark_recoveries(trace, recoveries, merged.origin_seconds)
        mark_batches(trace, waits, tally.last_step, merged.origin_seconds)
        folder.trace.write_text(json.dumps(trace))
    where = breakdown.mean(parts)
    numbers = {
        **summary(tally, peaks, traffic),
        "memory_before": before,
        "state_memory": states,
        "bubble_fraction": where.bubble_fraction,
        "data_waits": of_slowest(waits),
        "breakdown": where.as_dict(),
    }
    applied: Counter[int] = sum(ages, Counter())
    if applied:
        numbers["staleness"] = {str(age): applied[age] for age in sorted(applied)}
    return numbers
