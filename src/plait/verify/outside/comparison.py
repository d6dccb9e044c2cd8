"""A watched step beside one device's, which takes the batch at once or by the slices of the ranks.

The whole batch at once is what training means. A batch norm's statistics are those of a slice by
definition, and so are buffers that change with every forward. Such models are held against the
slices first. Statistics that ranks exchange are those of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from plait.values import JsonObject
from plait.verify.diagnosis.finding import Facts
from plait.verify.external import judge
from plait.verify.ill_conditioned import may_pass, note, nudged, wider
from plait.verify.outside.modules import SLACK
from plait.verify.outside.rows import Reading
from plait.verify.outside.task import DTYPES, Trial
from plait.verify.record.compare import TOLERANCE
from plait.verify.record.observation import Record
from plait.verify.reference import lowered
from plait.verify.reference.batches import Batch
from plait.verify.reference.one_device import Slice, run_reference, slicing_reasons
from plait.verify.reference.recipe import Recipe
from plait.verify.reference.rounding import Rerun, RoundingBounds, bounds, halves, scales
from plait.verify.reference.signs import beyond_the_ends
from plait.verify.reference.updates import own_updates
from plait.verify.report import Report


@dataclass(frozen=True)
class Judgement:
    """A report, with the record of one device that it is about.

    `slack` is the relative error of a module's output that passes. `by_slice`: one device took the
    slices of the ranks one by one.
    """

    report: Report
    truth: Record
    parallel: Record
    slack: float
    by_slice: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepComparison:
    """The steps of all ranks as one run, and how one device does them.

    `readings` say which samples each rank computed on. `adds_up`: parts of a batch have losses
    that add up. `clips`: some rank clipped its gradients. `facts` and `about` are for the report.
    """

    plain: nn.Module
    batches: Sequence[Batch]
    readings: Sequence[Reading]
    recipe: Recipe
    parallel: Record
    trial: Trial
    facts: Facts
    about: JsonObject
    adds_up: bool
    clips: bool

    def judged(self) -> Judgement:
        """The judgement by slices where the model asks for them, and else of the whole batch."""
        known = [one.without_repeats() for one in self.readings]
        parted = self.adds_up and all(one.is_partition for one in known)
        if not parted or not slicing_reasons(self.plain, self.batches[0]):
            return self._judgement(known, parted=parted, by_slice=False, halved=self.adds_up)
        sliced = self._judgement(known, parted=True, by_slice=True, halved=False)
        if not sliced.report.failed:
            return sliced
        whole = self._judgement(known, parted=True, by_slice=False, halved=False)
        return min(sliced, whole, key=lambda one: len(one.report.failed))

    def _judgement(
        self, readings: Sequence[Reading], *, parted: bool, by_slice: bool, halved: bool
    ) -> Judgement:
        """The judgement where one device takes the batch at once, or `by_slice`.

        `halved`: bounds of rounding come from halves of the batch as well.
        """

        def slices(step: int, batch: Batch) -> Sequence[Slice]:
            return readings[step].slices(batch)

        def train(recipe: Recipe, start: nn.Module, data: Sequence[Batch], again: bool) -> Record:
            parts = slices if by_slice else halves
            cut = by_slice or (again and halved)
            return run_reference(start, data, recipe, parts, by_slice=cut, first_buffers=True)

        truth = run_reference(
            self.plain,
            self.batches,
            self.recipe,
            slices,
            by_slice=by_slice,
            contributions=parted,
            first_buffers=True,
        )
        parallel, notes = without_local_loss(self.parallel, truth)
        if not self.clips:
            truth = Record(truth.start, [replace(seen, grad_norm=None) for seen in truth.steps])
        dtype = DTYPES[self.trial.dtype]
        slack = max(SLACK, self.trial.tolerance or 0.0)
        if self.trial.tolerance is None and dtype != torch.float64:
            derived = bounds(truth, train, self.recipe, self.plain, self.batches, dtype=dtype)
            report = self._shown(self._within(derived, parallel, truth))
            notes = (*notes, derived.note())
            return Judgement(report, truth, parallel, derived.middle, by_slice, notes)
        report, said = self._exactly(parallel, truth, train)
        report = self._shown(report)
        return Judgement(report, truth, parallel, slack, by_slice, (*notes, *said))

    def _shown(self, report: Report) -> Report:
        """The report without comparisons of losses where no step's loss is known."""
        if not all(math.isnan(seen.loss) for seen in self.parallel.steps):
            return report
        compared = [one for one in report.differences if one.kind != "loss"]
        return replace(report, differences=compared)

    def _exactly(
        self, parallel: Record, truth: Record, train: Rerun
    ) -> tuple[Report, tuple[str, ...]]:
        """The report within one tolerance, but for numbers that rounding moves further."""
        tolerance = self.trial.tolerance
        report = judge(parallel, truth, self.facts, tolerance=tolerance, **self.about)
        if not report.failed or report.refusals or report.tolerance != TOLERANCE[torch.float64]:
            return report, ()
        dtype = DTYPES[self.trial.dtype]
        limits = lowered.bounds(
            truth, lambda: train(self.recipe, self.plain, self.batches, False), dtype
        )
        notes = [lowered.note(limits)] if limits else []
        if limits:
            report = judge(parallel, truth, self.facts, limits=limits, **self.about)
        if report.failed and tolerance is None:
            moved = train(self.recipe, nudged(self.plain), self.batches, False)
            if may_pass(report, moved, truth):
                derived = bounds(truth, train, self.recipe, self.plain, self.batches, dtype=dtype)
                limits |= wider(report, derived.limits)
                report = judge(parallel, truth, self.facts, limits=limits, **self.about)
                notes.append(note(limits))
        return report, tuple(notes)

    def _within(self, derived: RoundingBounds, parallel: Record, truth: Record) -> Report:
        """The report of a step in a low precision, where each number has its own bound."""
        dtype = DTYPES[self.trial.dtype]
        more = derived.limited(scales(parallel, truth)) + own_updates(parallel, self.recipe, dtype)
        errors = beyond_the_ends(parallel, truth, self.recipe, derived)
        asked = {**derived.asked(), **self.about}
        return judge(parallel, truth, self.facts, more=more, errors=errors, **asked)


def without_local_loss(record: Record, truth: Record) -> tuple[Record, tuple[str, ...]]:
    """Losses that are not known are taken for right."""
    known = [not math.isnan(seen.loss) for seen in record.steps]
    steps = [
        seen if is_known else replace(seen, loss=right.loss)
        for seen, right, is_known in zip(record.steps, truth.steps, known, strict=True)
    ]
    note = (
        "no rank returned the loss of the whole batch, alike on all ranks: the loss was not "
        "compared"
    )
    return Record(record.start, steps), () if all(known) else (note,)
