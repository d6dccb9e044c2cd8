"""Numbers of a run's data: rows that were left out, and the waits of steps for their batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from plait.datasets.sample_set import SampleSet
from plait.run.hooks import BatchWait
from plait.trace.chrome import DATA, DATA_LANE
from plait.values import JsonObject

TRACED_STEPS = 5


@dataclass
class BatchWaits:
    """The waits of one rank for its batches, but for a run's first, which nothing could read ahead.

    Attributes:
        num_late: steps whose batch had not been read when they asked for it.
        seconds: that all steps waited, together.
        last: the waits of the last steps, the first one of a run included.
    """

    num_late: int = 0
    seconds: float = 0.0
    last: deque[BatchWait] = field(default_factory=lambda: deque(maxlen=TRACED_STEPS))

    def add(self, wait: BatchWait, is_first: bool) -> None:
        """Take in the wait of one step."""
        self.last.append(wait)
        if not is_first:
            self.num_late += not wait.was_ready
            self.seconds += wait.seconds


def bad_rows(dataset: SampleSet) -> JsonObject:
    """The number of rows that were left out, where the data counts them."""
    num_bad = getattr(dataset, "num_bad", None)
    return {} if num_bad is None else {"bad_rows": num_bad}


def of_slowest(waits_of_ranks: Sequence[BatchWaits]) -> JsonObject:
    """The late batches and the seconds of the rank that has most of each."""
    return {
        "steps": max(waits.num_late for waits in waits_of_ranks),
        "seconds": max(waits.seconds for waits in waits_of_ranks),
    }


def mark_batches(
    trace: JsonObject,
    waits_of_ranks: Sequence[BatchWaits],
    last_step: int,
    origin_seconds: float,
) -> None:
    """Add a lane of waits for each rank's last steps; `origin_seconds` is the trace's zero."""
    for rank, waits in enumerate(waits_of_ranks):
        trace["traceEvents"] += _lane(rank, waits.last, last_step, origin_seconds)


def _lane(
    rank: int, waits: Sequence[BatchWait], last_step: int, origin_seconds: float
) -> Iterator[JsonObject]:
    place = {"pid": rank, "tid": DATA_LANE}
    yield {"ph": "M", "name": "thread_name", **place, "args": {"name": DATA}}
    for step, wait in enumerate(waits, last_step - len(waits) + 1):
        yield {
            "ph": "X",
            "name": "wait for the batch",
            "cat": DATA,
            **place,
            "ts": (wait.began_seconds - origin_seconds) * 1e6,
            "dur": wait.seconds * 1e6,
            "args": {"step": step, "was_ready": wait.was_ready},
        }
