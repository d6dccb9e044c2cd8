"""The term that is explained, read and refused before torch is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from plait.errors import NotAvailable, PlanError
from plait.plan import Plan, check_runnable
from plait.plan.axes import ContextAxis, DataAxis, PipelineAxis
from plait.plan.facts import SCHEDULES

MOST_RANKS: Final = 64
FIRST_GRID: Final = {"2d": "tp4:2d", "2.5d": "tp8:2.5d,depth2", "3d": "tp8:3d"}


class Term(NamedTuple):
    """The plan of a term, and the axis that it splits: `dp` where it splits none."""

    plan: Plan
    axis: str


def read_term(text: str) -> Term:
    """The plan that runs for a term. Errors: `PlanError`, `NotAvailable`."""
    if not text.strip():
        raise PlanError("explain takes one term of a plan, for example explain dp4:zero3")
    plan = _with_micro_batches(Plan.parse(text), text)
    if plan.ep > 1 and plan.dp.size == 1:  # experts borrow the ranks of data
        plan = replace(plan, dp=replace(plan.dp, size=plan.ep))
    plan.check()
    check_runnable(plan)
    axes = _axes(plan)
    if len(axes) > 1:
        raise PlanError(
            f"'{text}' has {len(axes)} terms that split work ({', '.join(axes)}); explain shows "
            "one at a time, for example explain dp4:zero3, then explain tp4:2d"
        )
    if plan.tp.size == 1 and plan.tp.mode != "1d":
        raise PlanError(
            f"{plan.tp} is one rank, which splits nothing; take {FIRST_GRID[plan.tp.mode]}"
        )
    _check_words_of_one(plan)
    if plan.compile:
        raise NotAvailable(
            "explain shows each product as it runs, and compile makes one program of them; "
            "leave compile out"
        )
    if plan.world_size > MOST_RANKS:
        raise PlanError(
            f"'{text}' has {plan.world_size} ranks, and explain shows at most {MOST_RANKS}; take "
            "fewer, for example dp4 or tp8:3d: more ranks do the same"
        )
    return Term(plan, axes[0] if axes else "dp")


def _with_micro_batches(plan: Plan, text: str) -> Plan:
    """The plan of a text that names no micro-batches, with as many as its schedule needs."""
    if any(word.startswith("mb") for word in text.lower().split()):
        return plan
    least = SCHEDULES[plan.pp.schedule].least_micro_batches(plan.pp.size)
    return replace(plan, micro_batches=max(plan.micro_batches, least))


def _check_words_of_one(plan: Plan) -> None:
    """Raises `PlanError` for a word, such as a schedule, on an axis of one rank."""
    others: dict[str, PipelineAxis | ContextAxis | DataAxis] = {
        "pp": plan.pp,
        "cp": plan.cp,
        "dp": plan.dp,
    }
    for name, axis in others.items():
        if axis.size == 1 and axis != type(axis)() and (name, plan.ep > 1) != ("dp", True):
            two = str(replace(axis, size=2))
            raise PlanError(f"{axis} is one rank, which splits nothing; take {two}")


def _axes(plan: Plan) -> list[str]:
    sizes = {
        "pp": plan.pp.size,
        "tp": plan.tp.size,
        "dp": plan.dp.size if plan.ep == 1 else 1,
        "ep": plan.ep,
        "cp": plan.cp.size,
    }
    return [name for name, size in sizes.items() if size > 1]
