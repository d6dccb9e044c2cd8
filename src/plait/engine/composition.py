"""Which parallelisms do not go together. Each is refused before anything is allocated, with the
plan that does.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.engine.stages.cut import StagePartition
from plait.errors import ModelError, NotAvailable, PlanError
from plait.parallel.pipeline.actions import Schedule
from plait.plan import Plan
from plait.plan.facts import SCHEDULES, STRATEGIES


def check_composition(plan: Plan) -> None:
    """Refuse a plan whose strategies are each there, but do not go together.

    Raises:
        NotAvailable: two of its strategies do not go together.
    """
    facts = STRATEGIES[plan.dp.strategy]
    if plan.ep > 1 and not STRATEGIES[plan.dp.strategy].synchronous:
        raise NotAvailable(
            f"'{plan}': experts on other ranks need these to step together, and those of "
            f"dp:{plan.dp.strategy} do not; use "
            "allreduce, ring, server or zero1..3"
        )
    others = plan.world_size // plan.dp.size
    if others > 1 and plan.dp.size > 1 and not STRATEGIES[plan.dp.strategy].synchronous:
        raise NotAvailable(
            f"'{plan}': {plan.dp.strategy} does not run with other axes yet, whose ranks would "
            "have to agree on when one "
            f"of them is out of step; take dp{plan.dp.size} with them, or {plan.dp} alone"
        )
    if plan.pp.size > 1 and plan.dp.size > 1 and not facts.through_stages:
        raise NotAvailable(
            f"'{plan}': a parameter server places whole parameters by weight, for each stage "
            "otherwise, so copies of a tied "
            f"parameter would lie on different servers; take dp{plan.dp.size} or "
            f"dp{plan.dp.size}:zero1 with pipelines"
        )

    if SCHEDULES[plan.pp.schedule].asynchronous and not facts.keeps_versions:
        raise NotAvailable(
            f"'{plan}': {plan.pp.schedule} keeps several versions of whole weights, so it goes "
            "with dpN and dpN:ring alone; "
            "take one of these, or a schedule that flushes (1f1b)"
        )


def check_coded(plan: Plan, formats: Mapping[str, str]) -> None:
    """Refuse a base in codes where weights are rounded again, or are of other steps.

    Raises:
        NotAvailable: ranks or stages that do not step together, and products in eight bits.
    """
    if not formats:
        return
    base = f"'{plan}': a base in {min(formats.values())}"
    if not STRATEGIES[plan.dp.strategy].synchronous:
        raise NotAvailable(
            f"{base} goes with ranks that step together, and those of dp:{plan.dp.strategy} do "
            "not; use allreduce, ring, server or zero1..3, or adapter.base = 'none'"
        )
    if SCHEDULES[plan.pp.schedule].asynchronous:
        raise NotAvailable(
            f"{base} goes with schedules that flush, and {plan.pp.schedule} keeps several versions "
            "of whole weights; take 1f1b, or adapter.base = 'none'"
        )
    if plan.precision == "fp8":
        raise NotAvailable(
            f"{base} has numbers of few bits, and fp8 would round them again to others; take "
            "precision:bf16, or adapter.base = 'none'"
        )


def check_delayed(
    schedule: Schedule, stages: StagePartition, *, experts: bool, clips: bool
) -> None:
    """Refuse what an asynchronous schedule, which updates each stage by itself, cannot do.

    Raises:
        NotAvailable: a model with experts.
        ModelError: a parameter that several stages use.
        PlanError: clipping by the global norm.
    """
    if not schedule.asynchronous:
        return
    if experts:
        raise NotAvailable(
            f"{schedule.name} has no step that all experts share, so their balance is undefined; "
            "take 1f1b for these"
        )
    if stages.tied:
        raise ModelError(
            f"{schedule.name} updates each stage by itself, and {', '.join(stages.tied)} is on "
            "several stages; do not tie it, "
            "or take a schedule that flushes (1f1b)"
        )
    if clips:
        raise PlanError(
            f"{schedule.name} updates each stage by itself, so there is no global norm to clip by; "
            "leave clip_grad_norm out"
        )
