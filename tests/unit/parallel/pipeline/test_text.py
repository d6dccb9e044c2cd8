"""The text form round-trips; a file from a user is verified, and its errors name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.schedules import SCHEDULES, make
from plait.parallel.pipeline.text import dumps, load, loads

GOOD = """name mine   # a comment
micro-batches 2
placement 0 1
0: 0F0 0F1 0B0 0B1
1: 1F0 1B0 1F1 1B1
"""


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 4),
    st.integers(0, 5),
    st.booleans(),
    st.integers(1, 2),
)
def test_loads_is_the_inverse_of_dumps(
    name: str, p: int, more: int, lowered: bool, num_steps: int
) -> None:
    m = SCHEDULES[name].facts.least_micro_batches(p) + more
    schedule = make(name, p, m, 2 if name == "interleaved" else 1, num_steps=num_steps)
    schedule = lower(schedule) if lowered else schedule
    assert loads(dumps(schedule)) == schedule


def test_a_file_of_a_user(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(GOOD)
    schedule = load(path)
    assert (schedule.name, schedule.num_ranks, schedule.num_micro_batches) == ("mine", 2, 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0B1", "0Q1", "mine, line 4: '0Q1' is no action"),
        ("placement 0 1", "plaecment 0 1", "mine, line 3: 'plaecment' is no field"),
        ("micro-batches 2", "", "mine: the line 'micro-batches ...' is missing"),
        ("1: 1F0", "2: 1F0", r"mine: ranks must be 0 to n-1 without gaps, found \[0, 2\]"),
        ("placement 0 1", "placement 0 0", "mine: placement names the ranks"),
        ("micro-batches 2", "micro-batches two", "mine: invalid literal"),
        ("0B1\n", "\n", "backward is B, or I and W; found nothing"),
    ],
)
def test_errors_name_the_source_and_the_line(old: str, new: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        loads(GOOD.replace(old, new), "mine")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="No such file"):
        load(tmp_path / "none.txt")
