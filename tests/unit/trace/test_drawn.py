"""Timelines as a page's data: what a pointer is told, and a promise above what was measured."""

from __future__ import annotations

from plait.trace import Timeline
from plait.trace.drawn import drawn_timeline, laid_over
from plait.trace.records import CommEvent, Span


def timeline(seconds: float) -> Timeline:
    made = Timeline()
    made.add(Span("0F0", "F", 0, 0.0, seconds, {"micro_batch": 0}))
    made.add(Span("0B0", "B", 0, seconds, 2 * seconds, {"micro_batch": 0}))
    return made


def test_a_box_tells_what_when_how_long_and_the_bytes_that_moved_meanwhile() -> None:
    made = timeline(0.002)
    made.add(CommEvent("dp", "all_gather", 4096, 0.0, 0.001, 0))
    made.add(CommEvent("pp", "receive", 100, 0.0, 0.004, 0, exposed_seconds=0.001))
    made.add(CommEvent("dp", "reduce", 7, 0.0, 0.5, 0))  # ends after both
    made.add(CommEvent("dp", "reduce", 9, 0.0, 0.001, 1))  # of another rank
    forward, backward, wait = drawn_timeline(made, "measured")["lanes"][0]["boxes"]
    assert forward[4] == "0F0, micro-batch 0, 2.000 ms from 0.000 on; messages: dp 4,096 bytes"
    assert backward[4].endswith("messages: pp 100 bytes")
    assert wait[4] == "waited 1.000 ms for receive on pp, 100 bytes" and wait[5]


def test_a_promise_lies_above_what_was_measured() -> None:
    measured = drawn_timeline(timeline(0.002), "measured: step 2")
    promised = drawn_timeline(timeline(0.001), "predicted")
    (lane,) = laid_over(measured, promised, "predicted")["lanes"]
    assert [box[:4] for box in lane["boxes"]] == [box[:4] for box in measured["lanes"][0]["boxes"]]
    assert lane["boxes"][0][4].endswith("; predicted: 1.000 ms")
    assert [box[:2] for box in lane["above"]] == [[0.0, 0.001], [0.001, 0.002]]
    assert all(box[4].startswith("predicted: 0") for box in lane["above"])
