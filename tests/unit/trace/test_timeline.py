"""The timeline: records, merges, the trace file, the text."""

from __future__ import annotations

import json

import pytest

from plait.trace import CommEvent, MemoryMark, Span, Timeline, render


def _timeline() -> Timeline:
    timeline = Timeline(rank=1)
    timeline.add(Span("0F0", "forward", 1, 0.0, 1.0, {"micro_batch": 0}))
    timeline.add(Span("0B0", "backward", 1, 1.0, 2.0))
    timeline.add(CommEvent("dp", "all_reduce", 100, 0.5, 3.5, 1, 0.25))
    timeline.add(MemoryMark(1, 2.0, {"parameters": 10, "activations": 5}))
    return timeline


def test_lengths():
    timeline = _timeline()
    assert timeline.seconds == 4.0
    assert Timeline().seconds == 0.0
    assert timeline.ranks == (1,)


def test_busy_time_counts_overlaps_once():
    timeline = Timeline()
    for start, length in ((0.0, 2.0), (1.0, 2.0), (1.5, 0.5), (5.0, 1.0)):
        timeline.add(Span("x", "forward", 0, start, length))
    timeline.add(Span("u", "update", 0, 7.0, 1.0))
    assert timeline.busy_seconds(0) == 5.0
    assert timeline.busy_seconds(0, ["forward"]) == 4.0
    assert timeline.busy_seconds(1) == 0.0


def test_a_span_measures_its_block_even_when_it_raises():
    timeline = Timeline(rank=3)
    with pytest.raises(ValueError, match="inside"), timeline.span("0F0", "forward", stage=0):
        raise ValueError("inside")
    (span,) = timeline.spans
    assert (span.name, span.kind, span.rank, dict(span.args)) == ("0F0", "forward", 3, {"stage": 0})
    assert span.seconds >= 0


def test_disabled_records_nothing():
    timeline = Timeline(enabled=False)
    with timeline.span("a", "b"):
        pass
    timeline.add(Span("a", "b", 0, 0, 1))
    timeline.mark_memory({"parameters": 1})
    assert not timeline.spans
    assert not timeline.marks


def test_merge_puts_all_on_the_earliest_origin():
    early = Timeline(0, origin_seconds=100.0)
    late = Timeline(1, origin_seconds=101.5)
    early.add(Span("a", "f", 0, 1.0, 1.0))
    late.add(Span("b", "f", 1, 1.0, 1.0))
    late.add(CommEvent("dp", "send", 8, 0.0, 1.0, 1, 0.5))
    late.add(MemoryMark(1, 0.5, {"parameters": 1}))
    merged = Timeline.merge([late, early])
    assert [(s.name, s.start_seconds) for s in merged.spans] == [("b", 2.5), ("a", 1.0)]
    assert (merged.comms[0].start_seconds, merged.comms[0].exposed_seconds) == (1.5, 0.5)
    assert merged.marks[0].at_seconds == 2.0
    assert merged.ranks == (0, 1)


def test_the_trace_has_a_process_for_each_rank_and_two_lanes():
    trace = json.loads(json.dumps(_timeline().to_chrome()))
    events = trace["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {
        ("process_name", "rank 1"),
        ("thread_name", "compute"),
        ("thread_name", "comm"),
    }
    (forward,) = [e for e in events if e["name"] == "0F0"]
    assert (forward["ph"], forward["pid"], forward["ts"], forward["dur"]) == ("X", 1, 0.0, 1e6)
    begin, end = [e for e in events if e["name"] == "dp all_reduce"]
    assert (begin["ph"], end["ph"], begin["id"]) == ("b", "e", end["id"])
    assert (begin["ts"], end["ts"], begin["args"]["bytes"]) == (5e5, 4e6, 100)
    (memory,) = [e for e in events if e["ph"] == "C"]
    assert memory["args"] == {"parameters": 10, "activations": 5}


def test_render():
    timeline = Timeline()
    for rank, start in ((0, 0.0), (1, 1.0)):
        timeline.add(Span("F", "forward", rank, start, 1.0))
        timeline.add(Span("B", "backward", rank, start + 1, 2.0))
    assert render(timeline, width=8).splitlines() == [
        "rank 0 |FFBBBB..|",
        "rank 1 |..FFBBBB|",
        "        B backward  F forward  . idle   4000.00 ms",
    ]
    assert render(Timeline()) == "(no spans)"


def test_a_trace_is_read_back_as_the_timeline_that_it_was() -> None:
    timeline = _timeline()
    again = Timeline.from_chrome(json.loads(json.dumps(timeline.to_chrome())))
    assert again.spans == timeline.spans
    assert again.comms == timeline.comms
    assert again.marks == timeline.marks


def test_steps_are_told_apart_by_their_label() -> None:
    first = Timeline(0, origin_seconds=0.0)
    second = Timeline(0, origin_seconds=2.0)
    for step in (first, second):
        step.add(Span("0F0", "F", 0, 0.0, 1.0, {"stage": 0}))
        step.add(CommEvent("dp", "all_reduce", 8, 0.0, 0.5, 0, 0.1))
    merged = Timeline.merge([second.labelled(step=8), first.labelled(step=7)])
    merged.add(Span("elsewhere", "x", 0, 1.5, 0.1))
    parts = merged.by_label("step")
    assert list(parts) == [7, 8]
    assert [(span.start_seconds, dict(span.args)) for span in parts[8].spans] == [
        (2.0, {"stage": 0, "step": 8})
    ]
    assert [comm.start_seconds for comm in parts[8].comms] == [2.0]
