"""The verdict on a watched training step.

One device does the plain step with the optimizer that was seen, and the two are compared.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from plait.errors import RunError, some_of
from plait.values import JsonObject
from plait.verify.diagnosis.finding import Finding
from plait.verify.diagnosis.random_findings import with_chance
from plait.verify.outside.comparison import StepComparison
from plait.verify.outside.loss import summed
from plait.verify.outside.modules import (
    ModuleError,
    Sketch,
    compare,
    first_wrong,
    reference_sketches,
)
from plait.verify.outside.norms import norm_of_a_part
from plait.verify.outside.optimizer import factors, maker
from plait.verify.outside.rows import Reading, Rows, numbers, reading
from plait.verify.outside.task import Made, Trial
from plait.verify.outside.watch import ObservedUpdate, Settings
from plait.verify.record.observation import Observation, Record, Tensors, merge
from plait.verify.reference.batches import Batch, num_samples, taken
from plait.verify.reference.losses import loss_sum
from plait.verify.reference.one_device import call, run_reference
from plait.verify.reference.recipe import Loss, Recipe
from plait.verify.report import Report


@dataclass(frozen=True)
class RankSteps:
    """The record of one rank: what it held, its updates without their gradients, its samples.

    `in_a_row` is the number of samples that are packed into one row. `drawn`: the generators that
    its steps drew from.
    """

    start: Tensors
    steps: Sequence[Observation]
    updates: Sequence[ObservedUpdate]
    rows: Sequence[Rows] = field(default_factory=tuple)
    owns_loop: bool = False
    sketches: Sequence[Sketch] = ()
    in_a_row: int = 1
    drawn: tuple[str, ...] = ()


def judged(ranks: Sequence[RankSteps], plain: nn.Module, made: Made, trial: Trial) -> Report:
    """The report on all ranks; `plain` is the model as `make` gave it."""
    _check_updates(ranks)
    batches, readings, rows = (_in_loop if ranks[0].owns_loop else _given)(ranks, made)
    names = [name for name, value in plain.named_parameters() if value.requires_grad]
    settings = _settings(ranks)
    if not settings[0]:
        return _nothing_held(made, trial, len(ranks))
    kind = next(update.kind for rank in ranks for update in rank.updates if update.kind)
    loss, adds_up = summed(plain, batches[0], made.reference_loss)
    rates = factors(settings)
    recipe = Recipe(loss, maker(kind, settings, names), _limit(ranks), rates.__getitem__)
    clips = any(rank.updates[0].norms for rank in ranks)
    about: JsonObject = {"plan": trial.source.name, "world_size": len(ranks)}
    judgement = StepComparison(
        plain,
        batches,
        readings,
        recipe,
        _joined(ranks),
        trial,
        readings[0].facts(len(ranks)),
        about,
        adds_up,
        clips,
    ).judged()
    report, truth, notes = judgement.report, judgement.truth, judgement.notes
    findings = list(report.findings)
    if not report.ok:
        findings = [
            *_causes(ranks, readings, names, settings),
            *_norms_apart(ranks, truth),
            *norm_of_a_part([rank.steps for rank in ranks], truth.steps),
            *findings,
        ]
        findings = [*_packed(ranks, findings), *findings]
        slack = judgement.slack
        errors = (
            []
            if judgement.by_slice
            else _module_errors(ranks, rows, plain, batches[0], loss, slack=slack)
        )
        if any(one.step == 0 and one.kind != "buffer" for one in report.failed):
            findings += first_wrong(errors, slack)
        report = replace(report, modules=tuple(errors), module_slack=slack)
    if ranks[0].owns_loop:
        again = _read_twice(ranks, num_samples(made.together))
        report = replace(report, refusals=[*report.refusals, *(one.text for one in again)])
        findings = [*again, *findings]
    if len(ranks) > 1 and all(len(one.lines) == 1 for one in readings):
        whole = len(next(iter(readings[0].lines.values()))) == len(ranks)
        if whole:
            notes = (*notes, "every rank computed on every sample: no data axis was seen")
    report = replace(report, findings=findings, notes=[*made.notes, *notes, *report.notes])
    return _with_chance(report, plain, batches, recipe)


def _with_chance(
    report: Report, plain: nn.Module, batches: Sequence[Batch], recipe: Recipe
) -> Report:
    """The report, with what one device says of itself where the step is random."""
    still = Recipe(recipe.loss, lambda params: torch.optim.SGD(list(params), lr=0.0))

    def run() -> Record:
        return run_reference(plain, batches, recipe, first_buffers=True)

    def in_a_row() -> Record:
        return run_reference(plain, [batches[0]] * 2, still, first_buffers=True)

    return with_chance(report, run, in_a_row)


def _nothing_held(made: Made, trial: Trial, world_size: int) -> Report:
    """The report on optimizers that know no parameter of the model."""
    text = (
        "the optimizer holds no parameter of the model: it was made before the model was wrapped, "
        "or from parameters that the wrapper keeps for a forward"
    )
    found = Finding("stale-parameters", "optimizer", text, 0.98)
    return Report(
        (),
        [text],
        [found],
        trial.tolerance or 0.0,
        len(made.given),
        plan=trial.source.name,
        world_size=world_size,
    )


def _module_errors(
    ranks: Sequence[RankSteps],
    rows: Sequence[Rows],
    plain: nn.Module,
    batch: Batch,
    loss: Loss,
    *,
    slack: float,
) -> list[ModuleError]:
    """How far each module's output of the first step is from one device's, and its gradient."""
    model = copy.deepcopy(plain)

    def run() -> Tensor:
        total, count = loss_sum(loss, call(model, batch[0]), batch)
        return total / count

    truth = reference_sketches(model, run)
    return compare(truth, [rank.sketches for rank in ranks], rows, slack)


Data = tuple[list[Batch], list[Reading], list[Rows]]
"""The batch and the reading of every step, and the samples of every rank in the first."""


def _given(ranks: Sequence[RankSteps], made: Made) -> Data:
    """The batches that every step was given, and who computed on which samples."""
    readings = []
    for step, batch in enumerate(made.batches):
        rows = [rank.rows[step] for rank in ranks]
        readings.append(reading(rows, num_samples(batch)))
    return made.batches, readings, [rank.rows[0] for rank in ranks]


def _in_loop(ranks: Sequence[RankSteps], made: Made) -> Data:
    """The batches that a loop made itself, from the samples that its model was called with."""
    batches: list[Batch] = []
    readings = []
    first: list[Rows] = []
    for step in range(len(ranks[0].rows)):
        rows = [rank.rows[step] for rank in ranks]
        seen = dict.fromkeys(index for calls in rows for call in calls for index in call)
        if not seen:
            raise RunError(
                f"the samples of update {step} are not in the batches of make(): a loop of its own "
                "must feed the model what it was given"
            )
        place = {index: number for number, index in enumerate(seen)}
        local = [tuple(tuple(place[one] for one in call) for call in calls) for calls in rows]
        first = first or local
        batches.append(taken(made.together, list(seen)))
        readings.append(reading(local, len(seen)))
    return batches, readings, first


def _check_updates(ranks: Sequence[RankSteps]) -> None:
    if len({len(rank.updates) for rank in ranks}) > 1 or not ranks[0].updates:
        counts = ", ".join(str(len(rank.updates)) for rank in ranks)
        raise RunError(f"the ranks made {counts} updates: all make as many, and at least one")
    for number in range(len(ranks[0].updates)):
        if not any(rank.updates[number].updates for rank in ranks):
            raise RunError(
                f"no torch optimizer made an update in step {number}; a step that updates by hand "
                "is checked by reference_step(number) and parallel_step(number)"
            )


def _joined(ranks: Sequence[RankSteps]) -> Record:
    """All ranks as one run."""
    start = merge([Observation(0.0, {}, rank.start) for rank in ranks]).params
    steps = []
    for views in zip(*(rank.steps for rank in ranks), strict=True):
        buffers: dict[str, Tensor] = {}
        for view in views:
            buffers = {**view.buffers, **buffers}  # the first rank that has one
        steps.append(replace(merge(views), loss=_common_loss(views), buffers=buffers))
    seen = set().union(*(step.params for step in steps))
    return Record({name: value for name, value in start.items() if name in seen}, steps)


def _common_loss(views: Sequence[Observation]) -> float:
    """The loss that ranks returned alike; NaN where each returned its own, or none did."""
    known = [view.loss for view in views if not math.isnan(view.loss)]
    far = max(known, default=0.0) - min(known, default=0.0)
    return known[0] if known and far <= 1e-9 * abs(known[0]) else math.nan


def _settings(ranks: Sequence[RankSteps]) -> list[Mapping[str, Settings]]:
    """The settings of every parameter in each step, from whichever rank updates it."""
    settings: list[Mapping[str, Settings]] = []
    for step in range(len(ranks[0].updates)):
        known: dict[str, Settings] = {}
        for rank in ranks:
            known = {**rank.updates[step].settings, **known}
        settings.append(known)
    return settings


def _limit(ranks: Sequence[RankSteps]) -> float | None:
    """The norm that gradients were clipped to."""
    norms = [pair for rank in ranks for update in rank.updates for pair in update.norms]
    return norms[0][0] if norms else None


def _norms_apart(ranks: Sequence[RankSteps], truth: Record) -> list[Finding]:
    """Ranks that clip by norms of their own, where one norm is that of all gradients."""
    for step, right in enumerate(truth.steps):
        seen = [rank.updates[step].norms for rank in ranks]
        own = {rank: norms[-1][1] for rank, norms in enumerate(seen) if norms}
        first = next(iter(own.values()), 0.0)
        if all(abs(norm - first) <= 1e-9 * abs(first) for norm in own.values()):
            continue
        shown = ", ".join(f"{norm:.6g} on rank {rank}" for rank, norm in own.items())
        whole = math.sqrt(sum(norm**2 for norm in own.values()))
        why = ""
        if right.grad_norm and abs(whole - right.grad_norm) <= 1e-6 * whole:
            why = "; the square of the right norm is the sum of their squares"
        text = f"ranks clip by different norms, {shown}: each knows its own gradients alone{why}"
        return [Finding("norm", "clip", text, 0.97)]
    return []


def _packed(ranks: Sequence[RankSteps], found: Sequence[Finding]) -> list[Finding]:
    """Samples that share a row, where nothing else explains the difference."""
    in_a_row = max(rank.in_a_row for rank in ranks)
    if in_a_row < 2 or any(one.confidence >= 0.7 for one in found):
        return []
    text = (
        f"samples are packed {in_a_row} to a row, and see each other: attention or positions go on "
        "where a sample ends"
    )
    return [Finding("packing", "data", text, 0.9)]


def _starts_apart(ranks: Sequence[RankSteps]) -> tuple[str, ...]:
    """The parameters of which ranks have copies that differ before the first step."""
    first: dict[str, Tensor] = {}
    names = []
    for rank in ranks:
        for name, value in rank.start.items():
            known = first.setdefault(name, value)
            if known.shape == value.shape and not torch.equal(known, value):
                names.append(name)
    return tuple(dict.fromkeys(names))


def _read_twice(ranks: Sequence[RankSteps], num_samples: int) -> list[Finding]:
    """Samples that a loop trains on twice within one epoch, while it never comes to others."""
    counts: Counter[int] = Counter()
    for step in range(len(ranks[0].rows)):
        counts.update({index for rank in ranks for call in rank.rows[step] for index in call})
    twice = sorted(index for index, count in counts.items() if count > 1)
    never = [index for index in range(num_samples) if index not in counts]
    if not twice or not never or sum(counts.values()) > num_samples:
        return []
    text = (
        f"sample {numbers(twice)} was trained on twice and sample {numbers(never)} never, within "
        "one epoch: its order was begun again, or drawn again"
    )
    return [Finding("data-repeated", "data", text, 0.97)]


def _causes(
    ranks: Sequence[RankSteps],
    readings: Sequence[Reading],
    names: Sequence[str],
    settings: Sequence[Mapping[str, Settings]],
) -> list[Finding]:
    """Causes that were seen directly, without any arithmetic."""
    findings: list[Finding] = []
    split = next((one for one in (each.finding() for each in readings) if one), None)
    if split is not None:
        findings.append(split)
    stale = [name for rank in ranks for update in rank.updates for name in update.stale]
    if stale:
        unique = tuple(dict.fromkeys(stale))
        text = (
            f"the optimizer holds {some_of(unique)}, which the model no longer has: it was made "
            "before the model was wrapped"
        )
        findings.append(Finding("stale-parameters", "optimizer", text, 0.98, unique))
    apart = _starts_apart(ranks)
    if apart:
        text = f"ranks start from different values of {some_of(apart)}: nothing makes them one"
        findings.append(Finding("init", "init", text, 0.98, apart))
    missing = tuple(name for name in names if name not in settings[0])
    if missing and not stale:
        text = f"{some_of(missing)} trains and is in no optimizer"
        findings.append(Finding("not-updated", "optimizer", text, 0.95, missing))
    return findings
