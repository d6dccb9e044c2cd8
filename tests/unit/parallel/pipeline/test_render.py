"""The pictures: grid, terminal, SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from plait.parallel.pipeline.actions import COMPUTE
from plait.parallel.pipeline.render import coloured, grid, rows, svg
from plait.parallel.pipeline.schedules import SCHEDULES, make


def test_grid_of_1f1b_is_the_figure_of_the_paper() -> None:
    assert grid(make("1f1b", 2, 3)).splitlines() == [
        "  0 | 0F0 0F1 .   .   0B0 -   0F2 0B1 -   .   0B2 -",
        "  1 | .   1F0 1B0 -   1F1 1B1 -   1F2 1B2 -",
    ]


def test_mark_stands_around_the_cell() -> None:
    assert grid(make("1f1b", 2, 3), mark=(1, 2)).splitlines()[1].split() == [
        "1",
        "|",
        ".",
        "1F0",
        "1B0",
        ">1F1<",
        "1B1",
        "1F2",
        "1B2",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_is_drawn_once_in_each_picture(name: str) -> None:
    schedule = make(name, 3, 6, 2 if name == "interleaved" else 1)
    num_passes = sum(action.kind in COMPUTE for action in schedule)
    drawn = [cell for row in rows(schedule) for cell in row]
    assert len(drawn) == num_passes
    picture = ElementTree.fromstring(svg(schedule))
    shown = {str(cell.action) for cell in drawn}
    assert (
        sum(text.text in shown for text in picture.iter("{http://www.w3.org/2000/svg}text"))
        == num_passes
    )
    assert (
        sum(len(line.split()) for line in coloured(schedule).plain.splitlines()) == num_passes + 3
    )  # three rank numbers


def test_what_is_wider_than_the_terminal_goes_on_below() -> None:
    text = coloured(make("gpipe", 2, 8), 40).plain
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("\n\n") == 2


def test_updates_are_shown_where_they_happen() -> None:
    assert "0B0U" in grid(make("pipedream", 2, 2))
    assert "U" not in grid(make("1f1b", 2, 2))
