"""A run that is saved, loaded and goes on, against one device that never stopped.

The checkpoint may be loaded under another plan. Weights, optimizer state, the schedule's step and
the place in the data all have to come back. An error in one of them shows in the steps after the
load.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from plait.comm import World
from plait.errors import PlanError
from plait.launcher import joined_world
from plait.plan import Plan
from plait.verify.asynchronous import is_asynchronous
from plait.verify.diagnosis.finding import Finding
from plait.verify.judging import Asked, judge_record
from plait.verify.probes import with_optimizer
from plait.verify.problem import Problem, with_keys
from plait.verify.progress import Clock
from plait.verify.ranks import by_first, in_new_world, make_engine
from plait.verify.record.compare import Difference, differences
from plait.verify.record.gathered import on_first_rank
from plait.verify.record.observation import Record
from plait.verify.record.observe import RankRecord, join, record_rank
from plait.verify.reference.batches import Batch
from plait.verify.reference.one_device import Slice
from plait.verify.report import Report


@dataclass(frozen=True)
class Leg:
    """A part of a run: `steps` steps from where the checkpoint in `folder` stands.

    The first leg has no `before` and saves; the second is judged together with what came before.
    """

    problem: Problem
    plan: str
    steps: int
    folder: str
    before: Record | None = None
    first_plan: str = ""


def resumed(
    report: Report,
    problem: Problem,
    plan: Plan,
    plans: Sequence[str],
    *,
    steps: tuple[int, int],
    clock: Clock,
) -> Report:
    """The report with a part for each of `plans` that the run goes on under.

    `steps` are those before the save and after the load. Errors: `PlanError` for plans that cannot
    be loaded as they are.
    """
    before, after = steps
    others = [replace(Plan.parse(text), precision=plan.precision).check() for text in plans]
    check_resumable([plan, *others])
    if problem.num_samples is None:  # so few samples that an epoch ends after the load
        short = problem.train.global_batch * (before + after) - problem.train.global_batch // 2
        problem = replace(problem, num_samples=short)
    problem = with_optimizer(problem, "adamw")
    keys = {"schedule": "cosine", "warmup_steps": 1, "steps": before + after + 2}
    problem = replace(problem, train=with_keys(problem.train, **keys))
    parts = list(report.parts)
    left = []
    with tempfile.TemporaryDirectory(prefix="plait-verify-") as folder:
        where = str(Path(folder) / "saved")
        first = Leg(problem, str(plan), before, where)
        record: Record | None = None
        for number, other in enumerate(others, start=1):
            if clock.is_over:
                left.append(f"resume under {other}")
                continue
            clock.say(f"resume under {other} ({number} of {len(others)})")
            if record is None:
                record = join(in_new_world(_first_leg, first))
            second = Leg(problem, str(other), after, where, record, str(plan))
            begun = time.perf_counter()
            part = in_new_world(_second_leg, second)
            parts.append(replace(part, seconds=time.perf_counter() - begun))
    walked = [*left, *report.paths_not_walked]
    return replace(report, parts=tuple(parts), paths_not_walked=walked)


def check_resumable(plans: Sequence[Plan]) -> None:
    """Raises `PlanError` where a checkpoint cannot be compared after a load."""
    if joined_world() is not None:
        raise PlanError(
            "steps after a resume need worlds of this command's own; start it without torchrun"
        )
    for plan in plans:
        if is_asynchronous(plan):
            raise PlanError(
                f"{plan.pp}: a save ends its delayed updates, so a run that was saved is not one "
                f"that was not; write pp{plan.pp.size}:1f1b for steps after a resume"
            )


def _first_leg(world: World, leg: Leg) -> list[RankRecord]:
    """Train, save, and tell what was seen. Collective."""
    engine = make_engine(leg.problem, Plan.parse(leg.plan), world)
    axis = world.axis("dp")
    loader = leg.problem.loader(axis.rank, axis.size)
    own = record_rank(engine, islice(loader, leg.steps), leg.steps)
    engine.save(leg.folder, loader=loader.state_dict())
    return world.axis("world").gather_objects(own)


def _second_leg(world: World, leg: Leg) -> Report:
    """Load, go on, and judge both legs as one run. Collective."""
    plan = Plan.parse(leg.plan)
    engine = make_engine(leg.problem, plan, world)
    axis = world.axis("dp")
    loader = leg.problem.loader(axis.rank, axis.size)
    meta = engine.load(leg.folder)
    loader.load_state_dict(meta["loader"], meta["step"])
    own = record_rank(engine, islice(loader, leg.steps), leg.steps)
    records = on_first_rank(world, own)
    return by_first(world, lambda: judged(world, leg, plan, join(records)))


def judged(world: World, leg: Leg, plan: Plan, after: Record) -> Report:
    """Both legs against one device that never stopped."""
    assert leg.before is not None
    before = leg.before
    first = leg.problem.slices(Plan.parse(leg.first_plan))
    second = leg.problem.slices(plan)
    saved = len(before.steps)

    def slices(step: int, batch: Batch) -> Sequence[Slice]:
        return (first if step < saved else second)(step, batch)

    whole = Record(before.start, [*before.steps, *after.steps])
    steps = saved + leg.steps
    asked = Asked(leg.problem, plan, steps, None, world.mesh)
    report = judge_record(asked, whole, slices)
    lost = _not_as_saved(before, after, saved)
    found = list(report.findings)
    wrong = [one.step for one in report.failed]
    if lost or (wrong and min(wrong) >= saved):
        found = [_finding(lost, saved, leg), *_what_is_lost(lost, report), *found]
    title = f"resume under {plan}"
    return replace(report, differences=[*lost, *report.differences], findings=found, title=title)


def _not_as_saved(before: Record, after: Record, step: int) -> list[Difference]:
    """Parameters that were not loaded to the last bit."""
    if after.start is None:
        return []
    saved = Record(before.steps[-1].params, [])
    return [
        Difference(step, "start", one.name, one.error)
        for one in differences(Record(after.start, []), saved)
        if one.error
    ]


def _what_is_lost(lost: Sequence[Difference], report: Report) -> list[Finding]:
    """Which part of the state did not come back, by the first wrong step after the load."""
    first = min((one.step for one in report.failed), default=0)
    kinds = {one.kind for one in report.failed if one.step == first}
    causes = {one.cause for one in report.findings}
    if lost:
        part, text = "weights", "weights are not those that were saved"
    elif causes & {"samples", "targets", "data-order", "count"}:
        part, text = "data", "weights came back, and the place in the data did not"
    elif kinds & {"loss", "grad"}:
        part, text = (
            "buffers",
            "weights and data came back: buffers, or what a forward reads besides",
        )
    elif "learning-rate" in causes:
        part, text = "schedule", "weights, data and gradients are right, and the rate is not"
    elif kinds <= {"buffer"}:
        part, text = "buffers", "only buffers differ"
    else:
        part, text = "optimizer", "gradients and rate are right: the optimizer's state is lost"
    return [Finding(f"resume-{part}", "resume", text, 0.96, tuple(one.name for one in lost))]


def _finding(lost: Sequence[Difference], step: int, leg: Leg) -> Finding:
    text = (
        f"{leg.first_plan} was right up to its save after step {step - 1}, and is wrong after the "
        f"load under {leg.plan}"
    )
    if lost:
        text += f": {lost[0].name} was not loaded as it was saved"
    else:
        text += ": weights came back, so look at the optimizer's state, the schedule and the data"
    return Finding("resume", "resume", text, 0.97, tuple(one.name for one in lost))
