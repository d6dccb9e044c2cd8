"""The loop obeys: order, handlers, spans, and where it stopped."""

from __future__ import annotations

import pytest

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import Action, Kind
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.runtime import execute
from plait.parallel.pipeline.schedules import make
from plait.trace import Timeline

ONE_STAGE = ["0UNSHARD", "0F0", "0B0", "0F1", "0REDUCE", "0B1", "0U"]


def one_stage() -> list[Action]:
    return [Action.parse(text) for text in ONE_STAGE]


def test_executes_in_order_and_times_every_action() -> None:
    seen: list[str] = []
    timeline = Timeline()
    handlers = dict.fromkeys(Kind, lambda action: seen.append(str(action)))
    execute(one_stage(), handlers, timeline)
    assert seen == ONE_STAGE == [span.name for span in timeline.spans]
    execute(one_stage(), handlers, Timeline(enabled=False))
    assert seen == ONE_STAGE * 2


def test_a_missing_handler_is_an_error_before_anything_runs_unless_it_is_optional() -> None:
    seen: list[str] = []
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
    handlers = dict.fromkeys(kinds, lambda action: seen.append(str(action)))
    with pytest.raises(ScheduleError, match="no handler for REDUCE, UNSHARD"):
        execute(one_stage(), handlers, Timeline())
    assert not seen
    execute(
        one_stage(),
        handlers,
        Timeline(),
        optional=frozenset({Kind.UNSHARD, Kind.REDUCE, Kind.UPDATE}),
    )
    assert seen == ["0F0", "0B0", "0F1", "0B1", "0U"]


def test_an_exception_passes_through_and_the_last_span_says_where() -> None:
    def fail(action: Action) -> None:
        if action.micro_batch == 1:
            raise ValueError("boom")

    timeline = Timeline()
    with pytest.raises(ValueError, match="boom"):
        execute(one_stage(), dict.fromkeys(Kind, fail), timeline)
    assert timeline.spans[-1].name == "0F1"


def test_the_lowered_one_stage_schedule_is_the_only_engine_path() -> None:
    for name in ("naive", "1f1b"):
        assert [str(action) for action in lower(make(name, 1, 2)).ranks[0]] == ONE_STAGE
    assert (
        " ".join(map(str, lower(make("gpipe", 1, 2)).ranks[0]))
        == "0UNSHARD 0F0 0F1 0B0 0REDUCE 0B1 0U"
    )
