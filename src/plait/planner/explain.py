"""Why the winner won: for each other way to split the ranks, the cause of most of its loss, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plait.cost.machine import Machine
from plait.cost.records import Estimate, Job
from plait.cost.step import estimate_job
from plait.plan import Plan
from plait.planner.choose import Choice
from plait.planner.space import Degrees

CAUSES = {
    "compute": "smaller, slower matrix products",
    "recompute": "recomputation",
    "tensor": "tensor-parallel communication",
    "context": "exchanging keys and values",
    "expert": "dispatching tokens to experts",
    "bubble": "pipeline bubbles and uneven stages",
    "data": "gathering weights and reducing gradients",
    "update": "the optimizer step",
    "host": "waiting for the host to launch kernels",
    "cores": "more ranks than cores",
    "other": "other work",
}


@dataclass(frozen=True)
class Loss:
    """How a plan loses against the best: by how much, and to what."""

    plan: str
    slower: float
    cause: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.plan} loses {self.slower:.0%} to {self.cause}{self.detail}"


def explain(choice: Choice, limit: int = 8) -> list[str]:
    """One line for each other combination of degrees, nearest first, and then those that do not fit."""
    best = choice.plans[0]
    lines = [str(loss) for loss in losses(choice, best, limit)]
    lines += [f"{degrees} needs {times:.2g} times the memory" for degrees, times in _nearest_too_large(choice, limit)]
    if choice.found.not_opened:
        lines.append(f"{choice.found.not_opened} other combinations are at least 10% slower even without bubbles or waiting")
    return lines


def losses(choice: Choice, best: Estimate, limit: int) -> Iterator[Loss]:
    """The best plan of each other combination of degrees against the winner."""
    ours = _degrees(best.plan)
    others = sorted(choice.found.of_degrees.items(), key=lambda item: item[1].step_seconds)
    for degrees, guess in [item for item in others if item[0] != ours][:limit]:
        yield loss_against(best, estimate_job(choice.job, guess.plan, choice.machine), choice.machine, str(degrees))


def loss_against(best: Estimate, other: Estimate, machine: Machine, name: str = "") -> Loss:
    """What most of the difference between two estimates is due to."""
    theirs, ours = other.breakdown.as_dict(), best.breakdown.as_dict()
    cause = max(theirs, key=lambda key: theirs[key] - ours[key])
    detail = ""
    if cause == "tensor" and other.plan.tp.size > machine.devices_per_node:
        detail = " over the node boundary"
    if cause == "recompute" and other.plan.remat != best.plan.remat:
        detail = f" (remat:{other.plan.remat}, to fit)"
    slower = other.step_seconds / best.step_seconds - 1
    return Loss(name or str(other.plan), slower, CAUSES[cause], detail)


def explain_plan(job: Job, plan: Plan, machine: Machine, best: Estimate) -> str:
    """One named plan against the best: its loss, or by how much it does not fit."""
    other = estimate_job(job, plan, machine)
    text = str(loss_against(best, other, machine)) if other.step_seconds > best.step_seconds else f"{plan} is not slower"
    if not other.fits:
        text += f"; it needs {other.memory.total / other.memory_limit:.2g} times the memory"
    return text


def _degrees(plan: Plan) -> Degrees:
    return Degrees(plan.tp, plan.pp.size, plan.cp, plan.ep, plan.dp.size)


def _nearest_too_large(choice: Choice, limit: int) -> list[tuple[Degrees, float]]:
    return sorted(choice.found.too_large.items(), key=lambda item: item[1])[: limit // 2]
