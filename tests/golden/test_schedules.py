"""Every schedule for 4 ranks and 8 micro-batches as a text file: a change of a generator shows as a
diff of its list.

`python -m tests.golden.test_schedules` writes the files anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.parallel.pipeline.actions import Schedule
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.render import grid
from plait.parallel.pipeline.schedules import SCHEDULES, make
from plait.parallel.pipeline.text import dumps, loads

FOLDER = Path(__file__).parent / "schedules"
RANKS = 4
MICRO_BATCHES = 8


def golden(name: str) -> Schedule:
    return make(name, RANKS, MICRO_BATCHES, 2 if name == "interleaved" else 1)


def as_text(schedule: Schedule) -> str:
    """The list, and the grid as comments."""
    return dumps(schedule) + "".join(f"#{line}\n" for line in grid(schedule).splitlines())


def path(name: str) -> Path:
    return FOLDER / f"{name}.txt"


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_the_golden_one(name: str) -> None:
    assert as_text(golden(name)) == path(name).read_text(), (
        f"{name} changed; if on purpose: python -m tests.golden.test_schedules"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden_file_loads_as_the_schedule(name: str) -> None:
    assert loads(path(name).read_text()) == golden(name)


def test_the_lowered_list_that_two_ranks_execute() -> None:
    assert dumps(lower(make("1f1b", 2, 3))) == path("lowered-1f1b-2x3").read_text()


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in SCHEDULES:
        path(name).write_text(as_text(golden(name)))
    path("lowered-1f1b-2x3").write_text(dumps(lower(make("1f1b", 2, 3))))


if __name__ == "__main__":
    write()
