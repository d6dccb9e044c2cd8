"""The plans that no other plan beats in everything: time, memory and money."""

from __future__ import annotations

from collections.abc import Sequence

from plait.predict.cost.records import Estimate


def pareto_front(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Estimates that are not worse in all of step time, peak memory and price of a token,
    fastest first.
    """
    front: list[Estimate] = []
    for one in sorted(
        estimates, key=lambda estimate: (estimate.step_seconds, estimate.memory.total)
    ):
        if not any(_beats(other, one) for other in front):
            front.append(one)
    return front


def _beats(other: Estimate, one: Estimate) -> bool:
    return (
        other.step_seconds <= one.step_seconds
        and other.memory.total <= one.memory.total
        and other.cost_per_million_tokens <= one.cost_per_million_tokens
    )
