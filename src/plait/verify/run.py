"""Prove a plan: `run(config, plan)` trains it on real ranks and on one device, and compares
everything after every step.

The standard probes run one after the other in one world. When one fails, the reference is run again
with the contribution of every slice, for the diagnosis. Smaller plans are tried, to name the axis
that is to blame.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from plait.comm import World
from plait.config import Config, load
from plait.errors import PlaitError, PlanError, nearest
from plait.launcher import joined_world
from plait.parallel.pipeline.schedules import adopt
from plait.paths import not_walked
from plait.plan import Plan, check_kept, check_runnable, check_shares, facts
from plait.plan.fit import check_messages
from plait.plan.precisions import DRIFTING, PREDICTED, Messages
from plait.run import assemble
from plait.values import JsonMapping
from plait.verify.asynchronous import SKIPPED, is_asynchronous, record_stream
from plait.verify.diagnosis.bisect import bisect
from plait.verify.diagnosis.finding import Finding
from plait.verify.diagnosis.flow import by_parameters, locate_flow
from plait.verify.diagnosis.outputs import locate
from plait.verify.drift import DriftReport, drift
from plait.verify.judging import Asked, judge_steps, judge_stream
from plait.verify.probes import PROBES
from plait.verify.problem import Problem, plan_dtype, with_keys
from plait.verify.progress import Clock, FirstStep, predicted_seconds
from plait.verify.ranks import by_first, in_new_world, make_engine
from plait.verify.record.compare import TOLERANCE
from plait.verify.record.gathered import on_first_rank
from plait.verify.record.observe import record_rank
from plait.verify.report import Report
from plait.verify.resumed import resumed
from plait.verify.training import prove
from plait.verify.walks import SCALED

PRECISIONS = ("float64", "float32")
SURE = 0.9  # the confidence of findings that leave no module to look for


@dataclass(frozen=True)
class VerifyTask:
    """The task of the ranks: one plan, one problem, some probes. No probe changes a `final`
    plan.
    """

    problem: Problem
    plan: str
    steps: int
    tolerance: float | None
    probes: tuple[str, ...]
    final: bool = False
    training: str = ""  # the precision that training will use; empty for none beside the plan's
    messages: Messages = "whole"  # of training alone: no proof of equality rounds what travels
    clock: Clock = field(default_factory=Clock)


Runner = Callable[[VerifyTask], Report]


def run(
    config: Config | JsonMapping | str | Path,
    plan: Plan | str,
    *,
    steps: int = 3,
    dtype: str = "float64",
    tolerance: float | None = None,
    probes: Sequence[str] | None = None,
    steps_after_resume: int = 0,
    resume_plans: Sequence[str] = (),
    clock: Clock | None = None,
) -> Report | DriftReport:
    """Prove that `plan` trains what `config` describes as one device does.

    Args:
        config: a `Config`, a mapping of the same shape, or a TOML path.
        plan: a `Plan` or its text. Its ranks are started here, or those of torchrun are joined.
        steps: that are compared, from 1.
        dtype: float64 or float32, in the place of the plan's precision. With bf16 or fp8 no
            equality is asked for. The answer is then the plan's distance from float32, beside that
            of one device in the same precision (see `drift`).
        tolerance: the largest relative error that passes; by default 1e-10 or 1e-4.
        probes: names of `PROBES`; all by default.
        steps_after_resume: more than 0, and the run is also saved, loaded and goes on.
        resume_plans: the plans that load it; the same plan where none is named.
        clock: bounds the time. What was not begun in it is named in `paths_not_walked`, and the
            verdict is of what was.

    Returns:
        The report. A difference is no error but a report whose `ok` is false.

    Raises:
        PlanError: a plan, a dtype or a number of steps that cannot be proved. What `build` raises
            comes through too.
        ConfigError: a config that cannot be read.
    """
    clock = clock or Clock()
    names = chosen(probes)
    if dtype not in (*PRECISIONS, *DRIFTING):
        raise PlanError(
            f"dtype '{dtype}': a proof needs float64, or float32; bf16 and fp8 show how far "
            "rounding gets"
        )
    if steps < 1:
        raise PlanError(f"steps = {steps}: at least one step is needed")
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    own_precision = parsed.precision
    parsed = replace(parsed, precision=dtype).check()  # type: ignore[arg-type]  # one of the words
    check_runnable(parsed)
    _check_steps_together(parsed)
    config = load(config)
    check_shares(parsed, config.plan.shares, config.train.global_batch)
    check_kept(parsed, config.plan.keep_gathered)
    problem = problem_of(config)
    own = assemble.make_schedule(config) if parsed.pp.size > 1 else None
    if own is not None:
        adopt(own, parsed.pp.size, parsed.micro_batches)
    if dtype in DRIFTING:
        return drift(problem, parsed, steps)
    messages = problem.train.messages
    check_messages(parsed, messages)
    problem = replace(problem, train=with_keys(problem.train, messages="whole"))
    is_judged = own_precision not in (dtype, *PREDICTED)  # eight bits have no bound, but a drift
    training = own_precision if dtype == "float64" and is_judged and probes is None else ""
    first = FirstStep.of(problem)
    problem = replace(problem, largest_rate=first.rate)
    if clock.speaks:
        num_probes = len(names) + 2 * bool(training)
        seconds = predicted_seconds(first.seconds, parsed, steps, num_probes)
        clock.say(f"about {seconds:.0f} s, predicted from one step of one device")
    task = VerifyTask(
        problem,
        str(parsed),
        steps,
        tolerance,
        names,
        training=training,
        messages=messages,
        clock=clock,
    )
    report = verify(task)
    if steps_after_resume and report.ok:
        plans = tuple(resume_plans) or (str(parsed),)
        both = (steps, steps_after_resume)
        report = resumed(report, problem, parsed, plans, steps=both, clock=clock)
    notes = list(report.notes)
    if torch.cuda.is_available():
        notes.append("compared on processors: the GPU of this machine was not used")
    if messages != "whole":
        notes.append(_of_messages(messages, bool(training)))
    if own_precision not in ("float32", dtype):
        more = "; --dtype fp8 measures how far it drifts" if own_precision == "fp8" else ""
        notes.append(f"compared in {dtype}; the plan's own precision is {own_precision}{more}")
    return replace(report, notes=notes)


def _of_messages(messages: str, trained: bool) -> str:
    """The sentence on messages that training rounds, which no proof of equality can."""
    judged = "no run with rounded ones was judged"
    if trained:
        judged = "training has them rounded, and is judged by what bf16 does to one device"
    return f"train.messages '{messages}': equality is of whole messages; {judged}"


def problem_of(config: Config) -> Problem:
    """The problem that a config describes."""
    keys = assemble.model_keys(config)
    roles = assemble.roles_of(config)
    return Problem(
        keys if roles is None else {**keys, "roles": roles},
        config.data,
        config.train,
        plan=config.plan,
        backend=config.cluster.backend,
    )


def _check_steps_together(plan: Plan) -> None:
    """Some strategies are not meant to be one device's training, and a difference would say
    nothing.
    """
    dp = plan.dp
    if (
        dp.size > 1
        and not facts.STRATEGIES[dp.strategy].synchronous
        and not (dp.strategy == "async-server" and dp.stale == 0)
    ):
        raise PlanError(
            f"{dp}: its ranks do not step together, so one device has no equal step to compare "
            f"with; write dp{dp.size} to verify the rest of the plan"
        )


def verify(task: VerifyTask, runner: Runner | None = None, *, blame: bool = True) -> Report:
    """Run a task, and on failure smaller plans too. `runner` runs a task on the ranks of its plan;
    default: new local ranks.
    """
    alone = (
        runner is None and joined_world() is not None
    )  # in a world that is there, smaller ones cannot be made
    runner = runner or functools.partial(in_new_world, in_world)
    report = runner(task)
    if report.ok or not blame or report.refusals:
        return report
    if task.clock.is_over:
        note = "smaller plans were not tried: the time budget is used up"
        return replace(report, notes=[*report.notes, note])
    if alone:
        return replace(
            report,
            notes=[
                *report.notes,
                "smaller plans were not tried: the world is not this command's own",
            ],
        )
    failed = next(part.title for part in report.parts if not part.ok)
    if failed not in PROBES:
        return report
    return _with_blame(report, task, failed, runner)


def _with_blame(report: Report, task: VerifyTask, probe: str, runner: Runner) -> Report:
    """Name the axis by trying smaller plans with the probe that failed. What cannot run at all
    counts as failing.
    """

    def fails(plan: Plan) -> bool:
        task.clock.say(f"looking for the axis: {plan}")
        try:
            return not runner(replace(task, plan=str(plan), probes=(probe,), final=True)).ok
        except PlanError:
            raise
        except PlaitError:
            return True

    changed = PROBES[probe].apply(task.problem, Plan.parse(task.plan), task.steps)
    found = bisect(Plan.parse(task.plan) if isinstance(changed, str) else changed[1], fails)
    axis = "+".join(found.ingredients)
    return replace(
        report, findings=[*report.findings, Finding("bisected", axis, found.text(), 0.9)]
    )


def in_world(world: World, task: VerifyTask) -> Report:
    """Run all probes of a task on the ranks of `world`; every rank returns the same report.
    Collective.
    """
    plan = Plan.parse(task.plan)
    skipped = []
    parts: list[Report] = []
    left: list[str] = []
    reasons: dict[str, list[str]] = {}
    clock = replace(task.clock, speaks=task.clock.speaks and world.rank == 0, begun=time.time())
    count = len(task.probes) + bool(task.training)
    for number, name in enumerate(task.probes, start=1):
        if parts and clock.is_over_for_all(world):
            left.append(f"probe {name}")
            continue
        clock.tell(number, count, f"probe {name}")
        begun = time.perf_counter()
        changed = PROBES[name].apply(task.problem, plan, task.steps)
        if is_asynchronous(plan) and name in SKIPPED:
            changed = SKIPPED[name]
        if isinstance(changed, str):
            skipped.append(f"probe {name} does not apply: {changed}")
        else:
            under = plan if task.final else changed[1]
            part = replace(_compare(world, changed[0], under, task, reasons), title=name)
            if not part.ok and not task.final and all(earlier.ok for earlier in parts):
                part = _with_module(world, part, *changed)
            parts.append(replace(part, seconds=_seconds_since(world, begun)))
    if task.training and parts and clock.is_over_for_all(world):
        left.append(f"training in {task.training}")
    elif task.training and not is_asynchronous(plan):
        clock.tell(count, count, f"training in {task.training}")
        as_trained = replace(plan, precision=task.training).check()  # type: ignore[arg-type]
        begun = time.perf_counter()
        trained = with_keys(task.problem.train, messages=task.messages)
        part = prove(world, replace(task.problem, train=trained), as_trained, task.steps)
        parts.append(replace(part, seconds=_seconds_since(world, begun)))
    refused = [] if parts else ["no probe applies to this model: nothing was compared"]
    tolerance = parts[0].tolerance if parts else TOLERANCE[plan_dtype(plan)]
    found = _only(parts)
    walked = world.axis("world").gather_objects(world.paths.taken())
    return Report(
        [],
        refused,
        found,
        tolerance,
        task.steps,
        str(plan),
        world.size,
        notes=skipped,
        parts=tuple(parts),
        paths_not_walked=[*left, *not_walked(walked)],
    )


def _seconds_since(world: World, begun: float) -> float:
    """The seconds that the first rank took, so that every rank reports alike. Collective."""
    return float(world.axis("world").gather_objects(time.perf_counter() - begun)[0])


def _with_module(world: World, part: Report, problem: Problem, plan: Plan) -> Report:
    """The report with the guilty module, where outputs or gradients differ. Collective."""
    with world.paths.limited(SCALED if problem.hurried else {}):
        return _located(world, part, problem, plan)


def _located(world: World, part: Report, problem: Problem, plan: Plan) -> Report:
    where = locate(world, problem, plan)
    step = min((one.step for one in part.failed), default=0)
    wrong = any(one.step == step and one.kind in ("loss", "grad") for one in part.failed)
    known = any(one.confidence >= SURE for one in part.findings)
    if where is None and wrong and not known and not part.refusals and not is_asynchronous(plan):
        where = locate_flow(world, problem, plan, step)
    if where is None and wrong and not known:
        where = by_parameters([one for one in part.failed if one.step == step])
    return part if where is None else replace(part, findings=[where, *part.findings])


def _only(parts: Sequence[Report]) -> list[Finding]:
    """Which probes fail, where others pass: that is a diagnosis too."""
    failed = [part.title for part in parts if not part.ok]
    if not failed or len(failed) == len(parts):
        return []
    why = "; ".join(f"{name}: {_why(name)}" for name in failed)
    return [Finding("probe", "", f"{len(failed)} of {len(parts)} probes fail ({why})", 0.55)]


def _why(name: str) -> str:
    return PROBES[name].why if name in PROBES else "the precision and the update of training"


def _compare(
    world: World,
    problem: Problem,
    plan: Plan,
    task: VerifyTask,
    reasons: dict[str, list[str]],
) -> Report:
    """One problem under one plan against one device; the first rank does the reference and tells
    the others.
    """
    with world.paths.limited(SCALED if problem.hurried else {}):
        engine = make_engine(problem, plan, world)
        axis = world.axis("dp")
        record = record_stream if is_asynchronous(plan) else record_rank
        own = record(engine, problem.loader(axis.rank, axis.size), task.steps)
        records = on_first_rank(world, own)
        prove = judge_stream if is_asynchronous(plan) else judge_steps
        asked = Asked(problem, plan, task.steps, task.tolerance, world.mesh, reasons)
        return by_first(world, lambda: prove(asked, records))


def chosen(probes: Sequence[str] | None) -> tuple[str, ...]:
    """The probes by name; all of them by default.

    Raises:
        PlanError: there is no such probe.
    """
    for name in probes or ():
        if name not in PROBES:
            raise PlanError(f"there is no probe '{name}'; {nearest(name, PROBES)}")
    return tuple(PROBES if probes is None else probes)
