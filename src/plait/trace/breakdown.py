"""Where the time of a step goes on one rank: computing, waiting for each axis, and what is neither.

Waiting is the time in which a rank stood still for a message (`exposed_seconds`), also inside an
action. So the parts add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from plait.trace.records import CommEvent
from plait.trace.timeline import Timeline


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds of one step. `other_seconds`: outside all actions, as slicing the batch or reading
    the loss.
    """

    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    waiting_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def other_seconds(self) -> float:
        """Seconds that are neither computing nor waiting."""
        return max(
            0.0, self.step_seconds - self.compute_seconds - sum(self.waiting_seconds.values())
        )

    @property
    def bubble_fraction(self) -> float:
        """The share of the step in which the rank waited for other stages of the pipeline."""
        return self.waiting_seconds.get("pp", 0.0) / self.step_seconds if self.step_seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """Plain data, for `--json`."""
        return {
            "step_seconds": self.step_seconds,
            "compute_seconds": self.compute_seconds,
            "waiting_seconds": dict(self.waiting_seconds),
            "other_seconds": self.other_seconds,
        }


def of_steps(steps: Sequence[tuple[Timeline, float]]) -> TimeBreakdown:
    """The mean over the steps of one rank: (timeline, seconds) each; nothing of no step."""
    return mean([_of_step(timeline, seconds) for timeline, seconds in steps])


def _of_step(timeline: Timeline, seconds: float) -> TimeBreakdown:
    waiting: dict[str, float] = {}
    for comm in timeline.comms:
        if comm.rank == timeline.rank:
            waiting[comm.axis] = waiting.get(comm.axis, 0.0) + comm.exposed_seconds
    inside = sum(comm.exposed_seconds for comm in timeline.comms if _is_inside(comm, timeline))
    return TimeBreakdown(seconds, max(0.0, timeline.busy_seconds(timeline.rank) - inside), waiting)


def _is_inside(comm: CommEvent, timeline: Timeline) -> bool:
    """Whether a communication ended within a span."""
    end = comm.stop_seconds
    return any(span.start_seconds <= end <= span.stop_seconds for span in timeline.spans)


def mean(parts: Iterable[TimeBreakdown]) -> TimeBreakdown:
    """The mean over several steps, or over several ranks."""
    breakdowns = list(parts)
    if not breakdowns:
        return TimeBreakdown()
    axes = sorted({axis for part in breakdowns for axis in part.waiting_seconds})
    waiting = {}
    for axis in axes:
        seconds = sum(part.waiting_seconds.get(axis, 0.0) for part in breakdowns)
        waiting[axis] = seconds / len(breakdowns)
    step = sum(part.step_seconds for part in breakdowns) / len(breakdowns)
    return TimeBreakdown(
        step, sum(part.compute_seconds for part in breakdowns) / len(breakdowns), waiting
    )
