"""Pictures are SVG that parses, true to scale, and need nothing from outside; a page is one
file.
"""

from __future__ import annotations

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from plait.trace import CommEvent, Span, Timeline
from plait.trace.page import Grid, PageSection, Picture, page
from plait.trace.picture import (
    COLOURS,
    Frame,
    Lane,
    TimeBox,
    lanes,
    legend,
    timeline_lanes,
)

SVG = "{http://www.w3.org/2000/svg}"


def rects(svg: str) -> list[dict[str, str]]:
    return [dict(rect.attrib) for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect")]


def words(svg: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def timeline() -> Timeline:
    found = Timeline()
    found.add(Span("0F0", "F", 0, 1.0, 0.2))
    found.add(Span("1F0", "F", 1, 1.3, 0.1))
    found.add(CommEvent("pp", "receive", 64, 1.0, 0.3, 1, exposed_seconds=0.25))
    return found


def test_lanes_are_true_to_scale() -> None:
    drawn = lanes([Lane("a", (TimeBox(0, 1), TimeBox(2, 2)))], Frame(width=400, length=4))
    first, second = rects(drawn)
    assert float(second["x"]) - float(first["x"]) == pytest.approx(200)
    assert float(second["width"]) == pytest.approx(199)


def test_a_label_that_does_not_fit_is_left_out_and_its_hint_stays() -> None:
    drawn = lanes(
        [
            Lane(
                "a",
                (TimeBox(0, 1, label="12F345", hint="12F345: 1 ms"), TimeBox(1, 99, label="fits")),
            )
        ],
        Frame(width=500),
    )
    assert words(drawn) == ["a", "fits"]
    assert "12F345: 1 ms" in drawn


def test_axis_has_few_round_ticks() -> None:
    drawn = words(lanes([Lane("a", (TimeBox(0, 37.0),))], Frame(unit="ms")))
    assert drawn == ["a", "0 ms", "5", "10", "15", "20", "25", "30", "35"]


def test_a_timeline_is_a_lane_a_rank_from_its_first_start_on() -> None:
    first, second = timeline_lanes(timeline())
    assert (first.name, second.name) == ("rank 0", "rank 1")
    assert [first.boxes[0].start, first.boxes[0].length] == pytest.approx([0, 200])
    span, wait = second.boxes
    assert span.start == pytest.approx(300) and span.colour == COLOURS["F"]
    assert wait.slim and [wait.start, wait.length] == pytest.approx([50, 250])


def test_nothing_to_draw_is_still_a_picture() -> None:
    for drawn in (
        lanes([]),
        lanes(timeline_lanes(Timeline())),
        legend([("wait", "#fff")]),
    ):
        ElementTree.fromstring(drawn)


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.outside += [f"{tag} {key}" for key, _ in attrs if key in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_is_whole_and_escapes_what_it_is_given() -> None:
    drawn = lanes(timeline_lanes(timeline()))
    text = page(
        "a < b",
        [
            PageSection(
                "one", ["1 < 2", Grid(("x", "y"), (("<", "2"),)), Picture(drawn, "measured")]
            )
        ],
    )
    reader = Reader()
    reader.feed(text)
    assert not reader.open and not reader.outside
    assert "a &lt; b" in text and "1 &lt; 2" in text and "<td>&lt;</td>" in text and drawn in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
