"""Closed forms of schedules: time and live micro-batches without walking their actions, to rank
thousands of plans.

Bubbles (of `plan.facts`) are in units of 1F1B's, (p-1)(F+B). They and the live micro-batches are
those of the papers: Narayanan et al. 2021 (interleaved), Qi et al. 2023 (ZB-H1, ZB-H2), 2024 (V).
Asynchronous schedules are from Harlap et al. 2018 and Narayanan et al. 2021b. The estimate itself
replays the schedule; these only decide which plans are worth a replay.
"""

from __future__ import annotations

from plait.plan.facts import SCHEDULES, StagePlace

CHAIN = 2 / 3
"""The part of a micro-batch's work that the next stage waits for: forward and input gradient of
forward and backward.
"""


def rank_of_stage(name: str, num_ranks: int, virtual: int) -> tuple[int, ...]:
    """Which rank holds each stage: in rounds, or down and up again."""
    if SCHEDULES[name].is_vee:
        return (*range(num_ranks), *reversed(range(num_ranks)))
    return tuple(range(num_ranks)) * virtual


def closed_seconds(
    name: str, sizes: tuple[int, int, int], slowest: float, total: float, send: float
) -> float:
    """The step of a schedule. `sizes` is (ranks, stages of a rank, micro-batches). `slowest` and
    `total` are seconds of one micro-batch on the slowest rank and on all ranks; `send` is one
    transfer.
    """
    num_ranks, virtual, micro_batches = sizes
    sends = 2 * send * num_ranks * virtual
    if num_ranks == 1:
        return micro_batches * slowest
    facts = SCHEDULES[name]
    if facts.bubble is None:
        return micro_batches * (total + sends)
    if facts.asynchronous:
        return micro_batches * slowest
    if facts.needs_virtual:
        return micro_batches * slowest + (total - slowest + sends) / virtual
    bubble = facts.bubble
    seconds = micro_batches * slowest + bubble * (total - slowest + sends)
    if bubble >= 1.0:
        return seconds
    # Few micro-batches cannot fill a pipeline: forward and input gradients still go through all
    # ranks one after the other.
    return max(
        seconds, CHAIN * (total + (micro_batches - 1) * slowest) + (1 - CHAIN) * slowest + sends
    )


def closed_live(
    name: str, num_ranks: int, micro_batches: int, virtual: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Live micro-batches of each stage at its rank's peak, and the rank of each stage."""
    p = num_ranks
    m = micro_batches
    placement = rank_of_stage(name, p, virtual)
    live = []
    for stage, rank in enumerate(placement):
        most = SCHEDULES[name].live(StagePlace(p, m, virtual, stage, rank))
        live.append(max(1, min(m, most)))
    return tuple(live), placement
