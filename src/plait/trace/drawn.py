"""Timelines as data for a page's script: lanes of boxes, with what the pointer is told of each."""

from __future__ import annotations

from collections.abc import Sequence

from plait.trace.records import CommEvent, Span
from plait.trace.timeline import Timeline
from plait.values import JsonMapping

MOST_LANES = 16


def drawn_timeline(
    timeline: Timeline, caption: str, ranks: Sequence[int] = (), seconds: str = "seconds"
) -> JsonMapping:
    """The lanes of a timeline from its first start on; `ranks` are other names of its own.

    A box is its start, its length, its kind, its label, its hint, and whether it is a wait.
    """
    records: list[Span | CommEvent] = [*timeline.spans, *timeline.comms]
    origin = min((record.start_seconds for record in records), default=0.0)
    shown = timeline.ranks[:MOST_LANES]
    lanes: dict[int, list[list[object]]] = {rank: [] for rank in shown}
    for span in timeline.spans:
        if span.rank in lanes and span.seconds > 0:
            lanes[span.rank].append(_of_span(span, origin, seconds))
    for comm in timeline.comms:
        if comm.rank in lanes and comm.exposed_seconds > 0:
            lanes[comm.rank].append(_of_wait(comm, origin))
    if len(shown) < len(timeline.ranks):
        caption += f" (the first {len(shown)} of {len(timeline.ranks)} ranks)"
    names = {rank: ranks[rank] if ranks else rank for rank in shown}
    found = [{"name": f"rank {names[rank]}", "boxes": boxes} for rank, boxes in lanes.items()]
    return {"caption": caption, "lanes": found}


def _of_span(span: Span, origin: float, unit: str) -> list[object]:
    start = span.start_seconds - origin
    micro_batch = span.args.get("micro_batch")
    what = span.name if micro_batch is None else f"{span.name}, micro-batch {micro_batch}"
    times = f"{span.seconds:g} from {start:g} on"
    if unit == "seconds":
        times = f"{span.seconds * 1e3:.3f} ms from {start * 1e3:.3f} on"
    return [start, span.seconds, span.kind, span.name, f"{what}, {times}", False]


def _of_wait(comm: CommEvent, origin: float) -> list[object]:
    start = comm.stop_seconds - comm.exposed_seconds - origin
    hint = (
        f"waited {comm.exposed_seconds * 1e3:.3f} ms for {comm.op} on {comm.axis}, "
        f"{comm.bytes:,} bytes"
    )
    return [start, comm.exposed_seconds, "wait", "", hint, True]
