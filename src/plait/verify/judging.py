"""The verdict on the records of one probe's ranks: one device does the same, and the two are
compared.

Where they differ, one device is asked again. Its low-precision parts are moved in their last place,
its weights one bit aside, and every slice's gradient is recorded. Where that bit alone comes near
to the tolerance, perturbation says what passes (`rounding`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from plait.batch_trees import leaves_of
from plait.mesh import Mesh
from plait.plan import Plan
from plait.verify.asynchronous import join_stream, reference_stream
from plait.verify.diagnosis.finding import Facts
from plait.verify.diagnosis.masks import mask_findings
from plait.verify.diagnosis.random_findings import with_chance
from plait.verify.diagnosis.update_findings import NESTEROV
from plait.verify.external import judge
from plait.verify.ill_conditioned import may_pass, note, nudged, rounding_alone, wider
from plait.verify.problem import Problem, plan_dtype, reference_dtype
from plait.verify.record.compare import TOLERANCE, Key
from plait.verify.record.observation import Record
from plait.verify.record.observe import RankRecord, join
from plait.verify.record.samples import samples_of
from plait.verify.reference import lowered, rounding
from plait.verify.reference.batches import Batch, num_samples
from plait.verify.reference.one_device import Slice, pooled_losses, run_reference, slicing_reasons
from plait.verify.reference.recipe import Recipe
from plait.verify.report import Report


@dataclass(frozen=True)
class Asked:
    """A question for the evaluation: a problem under a plan. `tolerance` None: the precision's
    own. `reasons` are those for slices, of models that were asked before in this proof.
    """

    problem: Problem
    plan: Plan
    steps: int
    tolerance: float | None
    mesh: Mesh
    reasons: dict[str, list[str]] = field(default_factory=dict)

    def slicing_reasons(self, model: nn.Module, batch: Batch) -> list[str]:
        """Why one device runs slices; a model is tried once for all probes that share it."""
        about = (self.problem.model, self.problem.data, self.problem.idle, num_samples(batch))
        key = repr((*about, self.dtype))
        if key not in self.reasons:
            self.reasons[key] = slicing_reasons(model, batch)
        return list(self.reasons[key])

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the one device."""
        return reference_dtype(self.plan)

    def judge(
        self, parallel: Record, reference: Record, limits: Mapping[Key, float] | None = None
    ) -> Report:
        """The report on two records."""
        tolerance = TOLERANCE[plan_dtype(self.plan)] if self.tolerance is None else self.tolerance
        return judge(
            parallel,
            reference,
            facts_of(self.plan, self.mesh, self.problem, self.steps),
            tolerance=tolerance,
            limits=limits,
            plan=str(self.plan),
            world_size=self.mesh.size,
        )

    def judge_lowered(
        self, parallel: Record, reference: Record, rerun: Callable[[], Record]
    ) -> tuple[Report, dict[Key, float]]:
        """The report, and the limits of numbers that parts compute in a lower precision. These are
        computed only where something differs.
        """
        report = self.judge(parallel, reference)
        if not report.failed or report.refusals or self.tolerance is not None:
            return report, {}
        limits = lowered.bounds(reference, rerun, self.dtype)
        if not limits:
            return report, {}
        report = self.judge(parallel, reference, limits)
        return replace(report, notes=[lowered.note(limits)]), limits


def judge_stream(asked: Asked, records: Sequence[RankRecord]) -> Report:
    """The report on an asynchronous pipeline."""
    model = asked.problem.make_whole_model(asked.dtype)
    batches = asked.problem.batches(asked.steps, asked.dtype)

    def run() -> Record:
        return reference_stream(asked.problem, asked.plan, model, batches, records)

    report, _ = asked.judge_lowered(join_stream(records), run(), run)
    note = (
        "compared with one device that applies the same delayed gradients "
        f"({asked.plan.pp.schedule}), after the flush"
    )
    return replace(report, notes=[note, *report.notes])


def judge_steps(asked: Asked, records: Sequence[RankRecord]) -> Report:
    """The report on steps that end before the next begins."""
    return judge_record(asked, join(records), asked.problem.slices(asked.plan))


def judge_record(
    asked: Asked, parallel: Record, slices: Callable[[int, Batch], Sequence[Slice]]
) -> Report:
    """The report on one record; `slices` is how the run should cut each global batch."""
    problem = asked.problem
    plan = asked.plan
    model = problem.make_whole_model(asked.dtype)
    batches = problem.batches(asked.steps, asked.dtype)
    notes = asked.slicing_reasons(model, batches[0])
    pooled = pooled_losses(model) if plan.micro_batches > 1 and not notes else []
    how = {"by_slice": bool(notes), "by_micro_batch": bool(pooled)}

    def run(start: nn.Module = model, **more: bool) -> Record:
        return run_reference(start, batches, problem.recipe(), slices, **how, **more)

    def moving(
        recipe: Recipe, start: nn.Module, data: Sequence[Batch], in_halves: bool = False
    ) -> Record:
        if in_halves and not notes and not pooled:
            return run_reference(start, data, recipe, rounding.halves, by_slice=True)
        return run_reference(start, data, recipe, slices, **how)

    reference = run()
    report, limits = asked.judge_lowered(parallel, reference, run)
    said = list(report.notes)
    if report.failed and not report.refusals:
        moved = run(nudged(model))
        if asked.tolerance is None and may_pass(report, moved, reference):
            bounds = rounding.bounds(
                reference, moving, problem.recipe(), model, batches, dtype=asked.dtype
            )
            limits = limits | wider(report, bounds.limits)
            report = asked.judge(parallel, reference, limits)
            said.append(note(limits))
    notes = [*notes, *pooled, *said]
    if report.failed and not report.refusals:
        reference = run(contributions=True)
        report = asked.judge(parallel, reference, limits)
        found = rounding_alone(report, moved, reference)
        if notes and "dropout" in notes[0]:
            found += mask_findings(parallel, model, batches[0], problem.recipe(), slices)
        report = replace(report, findings=[*found, *report.findings])
        if notes and "random" in notes[0]:  # by more than the seeds of slices
            report = with_chance(report, run)
    notes += _not_clipped(reference, problem.train.clip_grad_norm)
    refused = [*report.refusals, *same_data(slices(0, batches[0]))]
    return replace(report, notes=notes, refusals=refused)


def _not_clipped(reference: Record, clip: float | None) -> list[str]:
    norms = [seen.grad_norm or 0.0 for seen in reference.steps]
    if clip is None or any(norm > clip for norm in norms):
        return []
    return [f"no gradient norm exceeded clip_grad_norm = {clip}: clipping was not tested"]


def same_data(parts: Sequence[Slice]) -> list[str]:
    """Ranks that see equal data agree whatever is reduced between them."""
    first = [leaves_of(part.batch)[0] for part in parts if num_samples(part.batch)]
    marks = [found for leaf in first if (found := samples_of((leaf, leaf)))]
    if len(marks) > 1 and all(one == marks[0] for one in marks[1:]):
        return [
            "every slice of the batch holds the same data, so a missing reduction would not show"
        ]
    return []


def facts_of(plan: Plan, mesh: Mesh, problem: Problem, steps: int) -> Facts:
    """The numbers of a run that a wrong factor may be."""
    sizes = {
        "mb": plan.micro_batches,
        "dp": plan.dp.size,
        "dp_replicate": plan.dp.replicate,
        "tp": plan.tp.size,
        "pp": plan.pp.size,
        "cp": plan.cp.size,
        "ep": plan.ep,
    }
    lines = {axis: mesh.lines(axis) for axis in ("dp", "tp", "pp", "cp") if sizes[axis] > 1}
    recipe = problem.recipe()
    rates = {
        f"learning rate of step {step}": problem.train.lr * recipe.lr_factor(step)
        for step in range(-1, steps + 1)
    }
    numbers = {"the global batch": float(problem.train.global_batch), **rates}
    if problem.model.get("vocab_size"):
        numbers["the vocabulary size"] = float(problem.model["vocab_size"])
    if problem.train.optimizer == "sgd" and problem.train.momentum and not problem.train.nesterov:
        numbers[NESTEROV] = 1 + problem.train.momentum
    return Facts(sizes, numbers, lines)
