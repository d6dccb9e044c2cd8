"""The text form of an action is its inverse, and refuses what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import Action, Kind, looped, straight, vee

actions = st.builds(
    lambda kind, stage, j: Action(kind, stage, j if kind.per_micro_batch else None),
    st.sampled_from(Kind),
    st.integers(0, 200),
    st.integers(0, 5000),
)


@given(actions)
def test_parse_is_the_inverse_of_str(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    ["2F0", "2B0", "2I0", "2W0", "2RECV_F0", "2SEND_B0", "2UNSHARD", "2RESHARD", "2REDUCE", "2U"],
)
def test_the_text_forms_of_the_design(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [("F0", "no action"), ("2F", "needs a"), ("2U3", "takes no"), ("2X1", "no action")],
)
def test_what_is_no_action_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Action.parse(text)


def test_placements() -> None:
    assert straight(3) == (0, 1, 2)
    assert looped(2, 3) == (0, 1, 0, 1, 0, 1)
    assert vee(3) == (0, 1, 2, 2, 1, 0)
