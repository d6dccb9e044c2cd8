"""The update and the precision that training will use, beside the proof in float64.

A proof in float64 takes other kernels than training: fused updates of float32 with the scale
inside, masters in float32 under weights in bf16. So the plan also runs as it will train. Its
gradients are held against one device in that precision. Its parameters are held against a plain
optimizer that is given the plan's own gradients. Perturbation says what passes (`rounding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from plait.comm import World
from plait.comm.simulated import simulate
from plait.mesh import Mesh
from plait.plan import Plan
from plait.verify.diagnosis.finding import Finding
from plait.verify.drift import DriftTask, observe
from plait.verify.probes import with_optimizer
from plait.verify.problem import Problem
from plait.verify.ranks import by_first, make_engine
from plait.verify.record.compare import Difference, differences
from plait.verify.record.gathered import on_first_rank
from plait.verify.record.observation import Record
from plait.verify.record.observe import RankRecord, join, record_rank
from plait.verify.reference.batches import Batch
from plait.verify.reference.lowered import LowPrecision
from plait.verify.reference.one_device import pooled_losses, run_reference, slicing_reasons
from plait.verify.reference.recipe import Recipe
from plait.verify.reference.rounding import (
    RUNS,
    OtherSums,
    RoundingBounds,
    bounds,
    halves,
    of_runs,
    scales,
)
from plait.verify.reference.updates import own_updates
from plait.verify.report import Report
from plait.verify.walks import SCALED

GRADIENTS = ("loss", "count", "grad", "grad_norm", "scale")


def prove(world: World, problem: Problem, plan: Plan, steps: int) -> Report:
    """The report of a plan in its own precision, float32 or bf16; alike on every rank.
    Collective.
    """
    problem = with_optimizer(problem, problem.train.optimizer)
    differences: list[Difference] = []
    for hurried in (False, True):
        own_problem = replace(problem, hurried=hurried)
        with world.paths.limited(SCALED if hurried else {}):
            engine = make_engine(own_problem, plan, world)
            axis = world.axis("dp")
            own = record_rank(engine, own_problem.loader(axis.rank, axis.size), steps)
            records = on_first_rank(world, own)
            differences += by_first(world, partial(judged, own_problem, plan, steps, records))
    tolerance = torch.finfo(torch.float32).eps
    title = f"training-{plan.precision}"
    report = Report(differences, [], [], tolerance, steps, str(plan), world.size, title)
    return replace(report, findings=_findings(report, plan))


SAYS = {
    "update": (
        "parameters are not what the plain rule makes of this run's own gradients: the fused "
        "kernel, its options, or the precision of masters and moments"
    ),
    "gradients": "gradients lie further from one device's than this precision can move them",
    "weights": "weights in bf16 are not the rounded masters",
}


def _findings(report: Report, plan: Plan) -> list[Finding]:
    """The part of training that is wrong in its own precision."""
    kinds = {one.kind for one in report.failed}
    if not kinds:
        return []
    part = "gradients"
    if kinds & {"param", "update"}:
        part = "update"
    elif kinds <= {"replica"}:
        part = "weights"
    text = f"in {plan.precision} alone: {SAYS[part]}"
    return [Finding(f"training-{part}", "precision", text, 0.9)]


def judged(
    problem: Problem, plan: Plan, steps: int, records: Sequence[RankRecord]
) -> list[Difference]:
    """Differences of a run in the precision of training from its two references."""
    parallel = join(records)
    differences = [
        *own_updates(parallel, problem.recipe(), torch.float32),
        *copies(records, parallel),
    ]
    if plan.precision == "bf16":
        truth, *shaken = _in_bf16(problem, steps)
        return [*differences, *_gradients(parallel, truth, of_runs(truth, shaken, torch.bfloat16))]
    model = problem.make_whole_model(torch.float32)
    batches = problem.batches(steps, torch.float32)
    notes = slicing_reasons(model, batches[0])
    pooled = bool(pooled_losses(model)) and plan.micro_batches > 1 and not notes
    how = {"by_slice": bool(notes), "by_micro_batch": pooled}

    def run(
        recipe: Recipe, start: nn.Module, data: Sequence[Batch], in_halves: bool = False
    ) -> Record:
        if in_halves and not notes and not pooled:
            return run_reference(start, data, recipe, halves, by_slice=True)
        return run_reference(start, data, recipe, problem.slices(plan), **how)

    recipe = problem.recipe()
    truth = run(recipe, model, batches)
    if problem.train.messages == "bf16":  # rounds less than a run in bf16, and in its places
        limits = of_runs(truth, _in_bf16(problem, steps), torch.bfloat16)
    else:
        limits = bounds(truth, run, recipe, model, batches, dtype=torch.float32)
    return [*differences, *_gradients(parallel, truth, limits)]


def _gradients(parallel: Record, truth: Record, limits: RoundingBounds) -> Iterator[Difference]:
    """Loss, norm and gradients, each with its limit."""
    for one in limits.limited((*differences(parallel, truth), *scales(parallel, truth))):
        if one.kind in GRADIENTS:
            yield one


def copies(records: Sequence[RankRecord], agreed: Record) -> Iterator[Difference]:
    """Weights in bf16 against the rounded masters: equal to the last bit."""
    for rank, record in enumerate(records):
        for step, (seen, truth) in enumerate(zip(record.steps, agreed.steps, strict=True)):
            for part in seen.published:
                master = truth.params[part.name].reshape(-1)[part.index()]
                equal = torch.equal(master.to(part.values.dtype), part.values)
                yield Difference(step, "replica", part.name, 0.0 if equal else 1.0, rank)


def _in_bf16(problem: Problem, steps: int) -> Iterator[Record]:
    """One device in bf16, and then again and again as its last place moves it."""
    task = DriftTask(problem, "precision:bf16", steps)
    mesh = Mesh.of(Plan.parse(task.plan))
    for seed in (None, *range(RUNS)):
        yield _on_one_device(mesh, task, seed)


def _on_one_device(mesh: Mesh, task: DriftTask, seed: int | None) -> Record:
    ranks: list[RankRecord] = simulate(mesh, _shaken, task, seed)
    return join(ranks)


def _shaken(world: World, task: DriftTask, seed: int | None) -> RankRecord:
    """One device in bf16; with a seed, results move and sums are taken in another order."""
    if seed is None:
        return observe(world, task)
    generator = torch.Generator().manual_seed(seed)
    with OtherSums(generator), LowPrecision(torch.float32, generator):
        return observe(world, task)
