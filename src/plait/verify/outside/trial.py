"""One trial of a training step: every rank runs it as it is, and one device does the plain step.

The two are compared like a plan and its reference: loss, gradients before the update, and
parameters after it.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn

from plait import comm
from plait.batch_trees import map_tensors
from plait.comm import World
from plait.errors import ConfigError, PlaitError, RankFailed, RunError, WorldSizeError
from plait.launcher import joined_world, launch
from plait.mesh import Mesh
from plait.values import PyTree
from plait.verify.diagnosis.random_findings import (
    CAUSE,
    drift,
    largest_of,
    of_draws,
    with_chance,
)
from plait.verify.external import Parallel, differential
from plait.verify.outside.alike import check_values, differently_made, marks_of
from plait.verify.outside.failing import in_words
from plait.verify.outside.judge import RankSteps, judged
from plait.verify.outside.modules import Sketch
from plait.verify.outside.rows import keys_of, rows_of, samples_in_a_row
from plait.verify.outside.source import LOOP, PAIR, Functions
from plait.verify.outside.task import DTYPES, Made, Trial
from plait.verify.outside.watch import ObservedUpdate, StepWatch, group_is_there
from plait.verify.record.gathered import on_first_rank
from plait.verify.record.observation import Observation, Record
from plait.verify.reference.drawn import Generators, all_from
from plait.verify.report import Report
from plait.verify.waiting import of_first

TIMEOUT_SECONDS = 60.0


def check(trial: Trial, nproc: int = 2) -> Report:
    """Run a training step on `nproc` new ranks, or on torchrun's, and judge it.

    Errors: `ConfigError`, for functions that cannot be used; `RankFailed`, where the step fails.

    Raises:
        WorldSizeError: fewer ranks than one.
    """
    joined = joined_world()
    if nproc < 1:
        raise WorldSizeError(f"--nproc {nproc}: a training step needs one rank or more")
    if trial.steps < 1:
        raise ConfigError(f"steps = {trial.steps}: at least one step is needed")
    count = nproc if joined is None else joined.world_size
    report: Report = launch(_rank_main, trial, nproc=count)[0]
    return report


def _rank_main(trial: Trial) -> Report:
    joined = joined_world()
    assert joined is not None
    world = comm.init(
        Mesh(dp=joined.world_size), backend="gloo", timeout_seconds=TIMEOUT_SECONDS, device="cpu"
    )
    together = False
    try:
        report = on_ranks(world, trial)
        together = True
        return report
    finally:
        world.close(together=together)


def on_ranks(world: World, trial: Trial) -> Report:
    """The report, alike on every rank. Collective."""
    with group_is_there():
        return _on_ranks(world, trial)


def _on_ranks(world: World, trial: Trial) -> Report:
    with in_words("the file", trial.source.path, ConfigError):
        functions = trial.source.functions()
    if set(PAIR) <= functions.keys():
        return _pair(world, trial, functions)
    with in_words("make()", trial.source.path, ConfigError):
        problem_made = _made(functions, DTYPES[trial.dtype], trial.steps)
    plain = copy.deepcopy(problem_made.model)
    apart = differently_made(world.axis("world").gather_objects(marks_of(problem_made)))
    with in_words("the step", trial.source.path, RankFailed):
        own = _run(functions, problem_made)
    ranks = on_first_rank(world, own)

    def judge() -> Report:
        report = judged(ranks, plain, problem_made, trial)
        return report if report.ok else replace(report, findings=[*apart, *report.findings])

    report = _by_first(world, judge)
    if report.ok or report.refusals or own.owns_loop:
        return report
    return _with_draws(world, trial, replace(problem_made, model=plain), own, report)


def _with_draws(world: World, trial: Trial, made: Made, own: RankSteps, report: Report) -> Report:
    """The report of no, where the step draws numbers outside its model: it runs again, from other
    seeds. Collective.
    """
    axis = world.axis("world")
    drawn = axis.gather_objects(own.drawn)
    names = tuple(dict.fromkeys(name for each in drawn for name in each))
    if not names or any(one.cause == CAUSE for one in report.findings):
        return report
    with all_from(0):
        functions = trial.source.functions()  # with globals as they were
        fresh = _made(functions, DTYPES[trial.dtype], trial.steps)
        with all_from(1):
            again = _run(functions, replace(made, loss=fresh.loss))
    here = drift(Record(None, again.steps), Record(None, own.steps))
    return of_draws(
        report, largest_of(axis.gather_objects(here)), "the step differs from itself", names
    )


def _by_first(world: World, judge: Callable[[], Report]) -> Report:
    """The first rank's report, or its error, on every rank. Collective."""
    told = of_first(world, lambda: _answer(judge))
    if isinstance(told, Exception):
        raise told
    return told


def _answer(judge: Callable[[], Report]) -> Report | Exception:
    try:
        return judge()
    except Exception as error:  # all ranks raise it: none waits for the first
        if isinstance(error, PlaitError):
            return error
        traceback.print_exc()
        return RunError(_reason(error))


def alone(functions: Functions, trial: Trial) -> Report:
    """The report on functions that stand for all ranks in this process. No group is needed."""
    made = _made(functions, DTYPES[trial.dtype], trial.steps)
    plain = copy.deepcopy(made.model)
    return judged([_run(functions, made)], plain, made, trial)


def _reason(error: Exception) -> str:
    return f"the plain step on one device failed: {type(error).__name__}: {error}"


def _pair(world: World, trial: Trial, functions: Functions) -> Report:
    """A file that has its own reference."""
    about = Parallel(gather=world.axis("world").gather_objects, name=trial.source.name)
    with in_words("a step of the two", trial.source.path, RankFailed):
        report = differential(
            functions[PAIR[0]],
            functions[PAIR[1]],
            steps=trial.steps,
            tolerance=trial.tolerance,
            parallel=about,
        )

    def run() -> Record:
        with all_from(0):
            step = trial.source.functions()[PAIR[0]]  # with globals as they were
        return Record(None, [Observation.of(step(number)) for number in range(trial.steps)])

    return with_chance(report, run)


def _made(functions: Functions, dtype: torch.dtype, steps: int) -> Made:
    result = functions["make"]()
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise ConfigError(
            f"make() returned {type(result).__name__}; it returns (model, batches, loss)"
        )
    model, batches, loss = result
    if not isinstance(model, nn.Module):
        raise ConfigError(f"make() returned a model of {type(model).__name__}, not a torch module")
    if loss is not None and not callable(loss):
        raise ConfigError(f"make() returned a loss of {type(loss).__name__}, not a function")
    check_values(model)
    if not isinstance(batches, Iterable):
        raise ConfigError(f"make() returned batches of {type(batches).__name__}, not a list")
    cast_batches = [_cast(batch, dtype) for batch in islice(batches, steps)]
    if not cast_batches:
        raise ConfigError("make() returned no batches")
    for batch in cast_batches:
        if not isinstance(batch, Mapping | Sequence | Tensor) or (
            not isinstance(batch, Mapping) and len(batch) != 2
        ):
            parts = f"{len(batch)} parts" if isinstance(batch, Sized) else type(batch).__name__
            raise ConfigError(
                f"make() returned a batch of {parts}; it is (inputs, targets), or a mapping that "
                "the model takes by keyword"
            )
    notes = _without_dropout(model)
    return Made(model.to(dtype), cast_batches, loss, notes)


def _cast(batch: PyTree, dtype: torch.dtype) -> PyTree:
    return map_tensors(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch)


def _without_dropout(model: nn.Module) -> tuple[str, ...]:
    """Switch dropout off, whose random numbers no two runs share."""
    has_dropout = False
    for module in model.modules():
        for key in ("p", "dropout", "attention_dropout"):
            if "dropout" in f"{type(module).__name__} {key}".lower():
                rate = getattr(module, key, None)
                if isinstance(rate, float) and rate > 0:
                    setattr(module, key, 0.0)
                    has_dropout = True
    return ("dropout is switched off on both sides",) if has_dropout else ()


def _run(functions: Functions, made: Made) -> RankSteps:
    """Every step on this rank, watched."""
    watch = StepWatch(made.model)
    prepare = functions.get("prepare")
    observations: list[Observation] = []
    updates: list[ObservedUpdate] = []
    rows = []
    packed = [1]
    sketches: list[Sketch] = []
    names = {name for name, _ in made.model.named_parameters()}

    def keep(loss: PyTree, keys: Mapping[bytes, int]) -> None:
        calls = watch.trained_on()
        rows.append(tuple(rows_of(call, keys) for call in calls))
        packed.extend(
            samples_in_a_row(call, observations)
            for call, observations in zip(calls, rows[-1], strict=True)
        )
        if not observations:
            sketches.extend(watch.sketches.found)
        buffers = watch.buffers()
        update = watch.take()
        norm = update.norms[-1][1] if update.norms else None
        params = watch.params(set(update.settings) | set(update.grads) | watch.frozen())
        seen = Observation(_number(loss), update.grads, params, norm, buffers=buffers)
        observations.append(seen)
        update.grads = {}
        updates.append(update)

    with watch.on():
        state = made.model if prepare is None else prepare(made.model)
        start = watch.params(names)
        begun = Generators.now()
        if LOOP in functions:
            keys = keys_of(made.together)
            watch.tell_updates(lambda: keep(None, keys))
            functions[LOOP](state, copy.deepcopy(made.given), made.loss)
        else:
            for given, batch in zip(made.given, made.batches, strict=True):
                watch.take()
                loss = functions["train_step"](state, copy.deepcopy(given), made.loss)
                keep(loss, keys_of(batch))
    return RankSteps(
        start,
        observations,
        updates,
        rows,
        LOOP in functions,
        sketches,
        max(packed),
        begun.moved(),
    )


def _number(loss: PyTree) -> float:
    """The loss that a step returned; NaN where it returned none."""
    if isinstance(loss, Tensor):
        loss = loss.detach().double().mean()
    try:
        return math.nan if loss is None else float(loss)
    except (TypeError, ValueError):
        return math.nan
