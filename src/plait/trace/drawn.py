"""Timelines as data for a page's script: lanes of boxes, each with the text of its tooltip."""

from __future__ import annotations

from collections.abc import Sequence

from plait.trace.records import CommEvent, Span
from plait.trace.timeline import Timeline
from plait.values import JsonMapping, JsonObject

MOST_LANES = 16
LENGTH, LABEL, HINT, WAIT = 1, 3, 4, 5
"""Places in a box."""


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
    sent = _messages(timeline)
    for span in timeline.spans:
        if span.rank in lanes and span.seconds > 0:
            box = _of_span(span, origin, seconds)
            box[HINT] = f"{box[HINT]}{_bytes_within(span, sent.get(span.rank, []))}"
            lanes[span.rank].append(box)
    for comm in timeline.comms:
        if comm.rank in lanes and comm.exposed_seconds > 0:
            lanes[comm.rank].append(_of_wait(comm, origin))
    if len(shown) < len(timeline.ranks):
        caption += f" (the first {len(shown)} of {len(timeline.ranks)} ranks)"
    names = {rank: ranks[rank] if ranks else rank for rank in shown}
    found = [{"name": f"rank {names[rank]}", "boxes": boxes} for rank, boxes in lanes.items()]
    return {"caption": caption, "lanes": found}


def laid_over(drawn: JsonMapping, promised: JsonMapping, word: str) -> JsonObject:
    """A drawn timeline with what was promised in a thin strip above each of its ranks.

    `word` says whose promise it is; the hint of a box tells the promised time beside its own.
    """
    known = {lane["name"]: lane["boxes"] for lane in promised["lanes"]}
    lanes = []
    for lane in drawn["lanes"]:
        strip = [box for box in known.get(lane["name"], []) if not box[WAIT]]
        times = {box[LABEL]: box[LENGTH] for box in strip}
        boxes = [
            [*box[:HINT], f"{box[HINT]}; {word}: {times[box[LABEL]] * 1e3:.3f} ms", box[WAIT]]
            if box[LABEL] in times
            else box
            for box in lane["boxes"]
        ]
        above = [[*box[:HINT], f"{word}: {box[HINT]}", False] for box in strip]
        lanes.append({"name": lane["name"], "boxes": boxes, "above": above})
    caption = f"{drawn['caption']}; the thin strip above a rank: {word}"
    return {"caption": caption, "lanes": lanes}


def _messages(timeline: Timeline) -> dict[int, list[CommEvent]]:
    """The messages of each rank."""
    found: dict[int, list[CommEvent]] = {}
    for comm in timeline.comms:
        if comm.bytes:
            found.setdefault(comm.rank, []).append(comm)
    return found


def _bytes_within(span: Span, comms: Sequence[CommEvent]) -> str:
    """The bytes of the messages that ended while a span lasted, by axis."""
    totals: dict[str, int] = {}
    for comm in comms:
        if span.start_seconds <= comm.stop_seconds <= span.stop_seconds:
            totals[comm.axis] = totals.get(comm.axis, 0) + comm.bytes
    parts = [f"{axis} {count:,} bytes" for axis, count in totals.items()]
    return f"; messages: {', '.join(parts)}" if parts else ""


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
