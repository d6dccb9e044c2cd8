"""Reasons for the winner: for each other way to split the ranks, the cause of most of its loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.plan import Plan
from plait.plan.axes import Remat
from plait.predict.cost.records import Estimate
from plait.predict.cost.step import estimate_job
from plait.predict.planner.choose import Choice
from plait.predict.planner.space import Degrees
from plait.predict.planner.words import percent, times

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
class LossCause:
    """The loss of a plan against the best: the whole, and each cause's part of the best's step."""

    plan: str
    slower: float
    causes: tuple[tuple[str, float], ...]
    gain: tuple[str, float] | None = None
    """Cause in which this plan is the better one, where that is much of its loss."""

    def __str__(self) -> str:
        text = f"{self.plan} loses {percent(self.slower)}"
        if len(self.causes) == 1 and self.causes[0][1] >= 0.8 * self.slower:
            return f"{text} to {self.causes[0][0]}"
        text += ": " + ", ".join(f"{percent(part)} to {cause}" for cause, part in self.causes)
        return (
            text
            if self.gain is None
            else f"{text}, less {percent(self.gain[1])} that it saves in {self.gain[0]}"
        )


def explain(choice: Choice, limit: int = 8) -> list[str]:
    """One line for each other combination of degrees, nearest first, and then those that do not
    fit.
    """
    lines = [str(loss) for loss in losses(choice, choice.plans[0], limit)]
    lines += [
        f"{degrees} needs {times(over)} times {_room(choice)}"
        for degrees, over in _nearest_too_large(choice, limit)
    ]
    if choice.found.not_opened:
        lines.append(
            f"{choice.found.not_opened} other combinations are at least 10% slower even without "
            "bubbles or waiting"
        )
    return lines


def losses(choice: Choice, best: Estimate, limit: int) -> list[LossCause]:
    """The best plan of each other combination of degrees against the winner, of those that were
    guessed to be nearest.
    """
    ours = _degrees(best.plan)
    nearest = sorted(choice.found.of_degrees.items(), key=lambda item: item[1].step_seconds)
    others = [(str(degrees), guess.plan) for degrees, guess in nearest if degrees != ours][:limit]
    estimates = [(name, estimate_job(choice.job, plan, choice.machine)) for name, plan in others]
    estimates.sort(key=lambda one: one[1].step_seconds)
    return [loss_against(choice, best, other, name) for name, other in estimates if other.fits]


def loss_against(choice: Choice, best: Estimate, other: Estimate, name: str = "") -> LossCause:
    """Causes of the difference between two estimates: those that make most of it, largest
    first.
    """
    theirs = other.breakdown.as_dict()
    ours = best.breakdown.as_dict()
    parts = sorted(((theirs[key] - ours[key]) / best.step_seconds, key) for key in theirs)
    slower = other.step_seconds / best.step_seconds - 1
    worth = [(part, key) for part, key in reversed(parts) if part > max(0.25 * slower, 0.0)] or [
        parts[-1]
    ]
    causes = tuple((_cause(choice, best, other, key), part) for part, key in worth)
    least, key = parts[0]
    gain = (CAUSES[key], -least) if -least > 0.25 * slower else None
    return LossCause(name or str(other.plan), slower, causes, gain)


def _cause(choice: Choice, best: Estimate, other: Estimate, key: str) -> str:
    """The cause in words, with what makes it so."""
    if key == "compute" and other.num_devices < best.num_devices:
        return f"computing on {other.num_devices} of {best.num_devices} devices"
    if key == "compute" and other.plan.precision != best.plan.precision:
        return f"precision:{other.plan.precision}"
    if key == "tensor" and other.plan.tp.size > choice.machine.devices_per_node:
        return f"{CAUSES[key]} over the node boundary"
    if key == "update" and other.plan.dp.offload:
        return "updating on the host (offload)"
    if key == "recompute" and other.plan.remat != best.plan.remat:
        less: Remat = "none" if best.plan.remat == "auto" else best.plan.remat
        without = estimate_job(choice.job, replace(other.plan, remat=less), choice.machine)
        return f"{CAUSES[key]} (remat:{other.plan.remat}{'' if without.fits else ', to fit'})"
    return CAUSES[key]


def explain_plan(choice: Choice, plan: Plan) -> str:
    """One named plan against the best: its loss, or by how much it does not fit."""
    best = choice.plans[0]
    other = estimate_job(choice.job, plan, choice.machine)
    text = f"{plan} is not slower"
    if str(plan) == str(best.plan):
        text = f"{plan} is the first choice"
    elif other.step_seconds > best.step_seconds:
        text = str(loss_against(choice, best, other))
    if other.memory.total > other.memory_limit:
        over = other.memory.total / other.memory_limit
        text += f"; it needs {times(over)} times {_room(choice)}"
    elif not other.fits:
        text += f"; it needs {times(other.host_overfull)} times the memory of a node's host"
    return text


def _room(choice: Choice) -> str:
    """The memory that a plan may take, in words."""
    share = choice.machine.memory.share
    return "the memory" if share == 1.0 else f"the memory that the risk leaves, {share:.0%}"


def _degrees(plan: Plan) -> Degrees:
    return Degrees(plan.tp, plan.pp.size, plan.cp, plan.ep, plan.dp.size)


def _nearest_too_large(choice: Choice, limit: int) -> list[tuple[Degrees, float]]:
    return sorted(choice.found.too_large.items(), key=lambda item: item[1])[: limit // 2]
