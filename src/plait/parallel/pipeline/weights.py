"""The weight versions of a schedule: which ones micro-batches see, how many live, how stale.

The order of actions alone decides. An update makes the next version of its stage. A forward takes
the newest one, or an older one by the schedule's `delay`; its backward must find that one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.parallel.pipeline.actions import Action, Kind, Schedule

LAST_BACKWARD = (Kind.BACKWARD, Kind.WEIGHT_GRAD)


@dataclass(frozen=True)
class StageWeights:
    """The weight versions of one stage; version k is what k updates made."""

    seen: dict[int, int]  # micro-batch -> version of its forward and backward
    applied: dict[int, int]  # micro-batch -> version that the update with its gradient changes
    num_versions: int  # most that must be kept at once

    @property
    def staleness(self) -> int:
        """The most updates between a forward's weights and the update with its gradient."""
        return max((self.applied[j] - version for j, version in self.seen.items()), default=0)


def stage_weights(schedule: Schedule) -> tuple[StageWeights, ...]:
    """For every stage, from the order of its rank's list; a flush schedule may still lack its
    update.
    """
    weights = []
    for stage, rank in enumerate(schedule.placement):
        actions = [action for action in schedule.ranks[rank] if action.stage == stage]
        weights.append(_follow(actions, schedule.delay))
    return tuple(weights)


def _follow(actions: Sequence[Action], delay: int | None) -> StageWeights:
    applied = {}
    newest = 0
    for action in actions:
        if action.kind in LAST_BACKWARD and action.micro_batch is not None:
            applied[action.micro_batch] = newest
        newest += action.kind is Kind.UPDATE
    seen: dict[int, int] = {}
    newest = 0
    most = 1
    live = set[int]()
    for action in actions:
        if action.kind is Kind.FORWARD and action.micro_batch is not None:
            delayed = applied.get(action.micro_batch, 0) - delay if delay is not None else newest
            seen[action.micro_batch] = max(0, delayed)
            live.add(action.micro_batch)
        most = max(most, len({newest} | {seen[j] for j in live}))
        if action.kind in LAST_BACKWARD:
            live.discard(action.micro_batch if action.micro_batch is not None else -1)
        newest += action.kind is Kind.UPDATE
    return StageWeights(seen, applied, most)
