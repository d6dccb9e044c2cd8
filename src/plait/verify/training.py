"""The update and the precision that training will use, beside the proof in float64.

A proof in float64 takes other kernels than training: fused updates of float32 with the scale
inside, masters in float32 under weights in bf16. So the plan also runs as it will train. Its
gradients are held against one device in float32. Its parameters are held against a plain optimizer
in float64 that is given the plan's own gradients. The remainder is the rounding of one update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from plait.comm import World
from plait.comm.simulated import simulate
from plait.mesh import Mesh
from plait.models.parameters import Parameters
from plait.plan import Plan
from plait.verify.drift import DriftTask, compared, observe
from plait.verify.probes import with_optimizer
from plait.verify.problem import Problem
from plait.verify.ranks import make_engine
from plait.verify.record.compare import TOLERANCE, Difference, differences, relative_error
from plait.verify.record.observation import Record
from plait.verify.record.observe import RankRecord, join, record_rank
from plait.verify.reference import lowered
from plait.verify.reference.one_device import (
    pooled_losses,
    run_reference,
    slicing_reasons,
)
from plait.verify.report import Report
from plait.verify.walks import SCALED

UPDATE = 1e-5  # of a parameter's largest update
ROUNDED = 4 * torch.finfo(torch.float32).eps  # of its largest element, in every step
GRADIENTS = ("loss", "count", "grad", "grad_norm")


def prove(world: World, problem: Problem, plan: Plan, steps: int) -> Report:
    """The report of a plan in its own precision, float32 or bf16; alike on every rank.
    Collective.
    """
    problem = with_optimizer(problem, problem.train.optimizer)
    found: list[Difference] = []
    for hurried in (False, True):
        asked = replace(problem, hurried=hurried)
        world.paths.limits = SCALED if hurried else {}
        engine = make_engine(asked, plan, world)
        axis = world.axis("dp")
        own = record_rank(engine, asked.loader(axis.rank, axis.size), steps)
        records = world.axis("world").gather_objects(own)
        if world.rank == 0:
            found += judged(asked, plan, steps, records)
    world.paths.limits = {}
    told: list[Difference] = world.axis("world").gather_objects(found)[0]
    tolerance = TOLERANCE[torch.float32]
    title = f"training-{plan.precision}"
    return Report(told, [], [], tolerance, steps, str(plan), world.size, title)


def judged(
    problem: Problem, plan: Plan, steps: int, records: Sequence[RankRecord]
) -> list[Difference]:
    """Differences of a run in the precision of training from its two references."""
    parallel = join(records)
    found = [*updates(parallel, problem), *copies(records, parallel)]
    model = problem.make_whole_model(torch.float32)
    batches = problem.batches(steps, torch.float32)
    notes = slicing_reasons(model, batches[0])
    pooled = bool(pooled_losses(model)) and plan.micro_batches > 1 and not notes
    how = {"by_slice": bool(notes), "by_micro_batch": pooled}

    def run() -> Record:
        return run_reference(model, batches, problem.recipe(), problem.slices(plan), **how)

    truth = run()
    if plan.precision == "bf16":
        return found + list(_drifts(problem, plan, steps, parallel, truth))
    gradients = [one for one in differences(parallel, truth) if one.kind in GRADIENTS]
    if any(not one.error <= TOLERANCE[torch.float32] for one in gradients):
        limits = lowered.bounds(truth, run, torch.float64, most=0.1)
        gradients = [replace(one, limit=limits.get(one.key)) for one in gradients]
    return found + gradients


def updates(record: Record, problem: Problem) -> Iterator[Difference]:
    """Parameters after each update against those of a plain optimizer in float64, from the same
    gradients.
    """
    assert record.start is not None
    names = [name for name in record.start if _trains(record, name)]
    params = {name: nn.Parameter(record.start[name].double()) for name in names}
    recipe = problem.recipe()
    optimizer = recipe.optimizer(Parameters(list(params.items())))
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, seen in enumerate(record.steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * recipe.lr_factor(step)
        before = {name: param.detach().clone() for name, param in params.items()}
        for name, param in params.items():
            grad = seen.grads.get(name)
            param.grad = None if grad is None else grad.double()
        optimizer.step()
        for name, param in params.items():
            value = param.detach()
            size = max(float(value.abs().max()), 1e-30) if value.numel() else 1.0
            moved = float((value - before[name]).abs().max()) if value.numel() else 0.0
            limit = UPDATE * moved / size + ROUNDED * (step + 1)
            error = relative_error(seen.params[name], value)
            # Scaled, so that what passes is the same number for all.
            scaled = error / limit * TOLERANCE[torch.float32]
            yield Difference(step, "param", name, scaled)


def _trains(record: Record, name: str) -> bool:
    return any(seen.grads.get(name) is not None for seen in record.steps)


def copies(records: Sequence[RankRecord], agreed: Record) -> Iterator[Difference]:
    """Weights in bf16 against the rounded masters: equal to the last bit."""
    for rank, record in enumerate(records):
        for step, (seen, truth) in enumerate(zip(record.steps, agreed.steps, strict=True)):
            for part in seen.published:
                master = truth.params[part.name].reshape(-1)[part.index()]
                equal = torch.equal(master.to(part.values.dtype), part.values)
                yield Difference(step, "replica", part.name, 0.0 if equal else 1.0, rank)


def _drifts(
    problem: Problem, plan: Plan, steps: int, mine: Record, truth: Record
) -> Iterator[Difference]:
    """How far the plan drifts in units of what one device in bf16 may."""
    task = DriftTask(problem, "precision:bf16", steps)
    one_device: Any = join(simulate(Mesh.of(Plan.parse(task.plan)), observe, task))
    report = compared(mine, one_device, truth, (str(plan), 1, steps))
    for kind in ("loss", "grad"):
        drift = report.kinds[kind]
        yield Difference(0, kind, f"drift of {drift.worst}", 0.0 if drift.ok else 1.0)
