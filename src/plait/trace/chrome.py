"""Records as a trace for Perfetto and chrome://tracing (the "Trace Event Format": JSON, times in
microseconds).

A process for each rank has one lane for computing and one for communication. Communications that
overlap are async events, because the format wants the slices of one lane nested.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from plait.trace.records import CommEvent, MemoryMark, Span
from plait.values import JsonMapping, JsonObject

COMPUTE_LANE = 0
COMM_LANE = 1
DATA_LANE = 2
DATA = "data"
"""The category of waits for batches, which are beside the steps and no part of a timeline."""


def to_chrome(
    spans: Iterable[Span], comms: Iterable[CommEvent], marks: Iterable[MemoryMark]
) -> JsonObject:
    """The trace object: `{"traceEvents": [...], "displayTimeUnit": "ms"}`."""
    spans = list(spans)
    comms = list(comms)
    marks = list(marks)
    records: list[Span | CommEvent | MemoryMark] = [*spans, *comms, *marks]
    ranks = sorted({record.rank for record in records})
    events = [event for rank in ranks for event in _lane_names(rank)]
    events += [_span(span) for span in spans]
    events += [event for number, comm in enumerate(comms) for event in _comm(comm, number)]
    events += [
        {
            "ph": "C",
            "name": "memory",
            "pid": mark.rank,
            "ts": mark.at_seconds * 1e6,
            "args": dict(mark.bytes_by_kind),
        }
        for mark in marks
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def mark_recoveries(
    trace: JsonObject, recoveries: Iterable[JsonMapping], origin_seconds: float
) -> None:
    """Add the recoveries of a run as moments of the trace, with their keys as arguments.

    `origin_seconds` is the trace's zero by `time.perf_counter`. What was before it lies below 0.
    """
    zero = time.time() - time.perf_counter() + origin_seconds
    for recovery in recoveries:
        trace["traceEvents"].append(
            {
                "ph": "i",
                "s": "g",
                "name": "recovery",
                "cat": "recovery",
                "pid": 0,
                "tid": COMPUTE_LANE,
                "ts": (recovery["moment"] - zero) * 1e6,
                "args": dict(recovery),
            }
        )


def _lane_names(rank: int) -> list[dict[str, object]]:
    names = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    ]
    for lane, name in ((COMPUTE_LANE, "compute"), (COMM_LANE, "comm")):
        names.append(
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
        )
    return names


def _span(span: Span) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": COMPUTE_LANE,
        "ts": span.start_seconds * 1e6,
        "dur": span.seconds * 1e6,
        "args": dict(span.args),
    }


def _comm(comm: CommEvent, number: int) -> list[dict[str, object]]:
    common = {
        "name": f"{comm.axis} {comm.op}",
        "cat": "comm",
        "pid": comm.rank,
        "tid": COMM_LANE,
        "id": number,
    }
    args = {
        "axis": comm.axis,
        "op": comm.op,
        "bytes": comm.bytes,
        "exposed_us": comm.exposed_seconds * 1e6,
    }
    return [
        {**common, "ph": "b", "ts": comm.start_seconds * 1e6, "args": args},
        {**common, "ph": "e", "ts": comm.stop_seconds * 1e6},
    ]


def from_chrome(trace: JsonMapping) -> tuple[list[Span], list[CommEvent], list[MemoryMark]]:
    """The records of a trace that `to_chrome` made: its inverse, up to rounding. Raises KeyError or
    ValueError for others.
    """
    spans: list[Span] = []
    marks: list[MemoryMark] = []
    begun: dict[Any, JsonMapping] = {}
    comms: list[CommEvent] = []
    for event in trace["traceEvents"]:
        phase = event["ph"]
        if phase == "X" and event["cat"] != DATA:
            start = event["ts"] / 1e6
            seconds = event["dur"] / 1e6
            spans.append(
                Span(event["name"], event["cat"], event["pid"], start, seconds, event["args"])
            )
        elif phase == "b":
            begun[event["id"]] = event
        elif phase == "e":
            start = begun[event["id"]]["ts"]
            args = begun[event["id"]]["args"]
            times = start / 1e6, (event["ts"] - start) / 1e6
            exposed = args["exposed_us"] / 1e6
            comms.append(
                CommEvent(args["axis"], args["op"], args["bytes"], *times, event["pid"], exposed)
            )
        elif phase == "C":
            marks.append(MemoryMark(event["pid"], event["ts"] / 1e6, event["args"]))
    return spans, comms, marks
