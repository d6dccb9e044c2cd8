"""Bars are on one scale, say their values in fitting units, and take hostile names as text."""

from __future__ import annotations

import re

import pytest

from plait.trace.bars import Bar, Bars
from plait.trace.units import size_words, time_words

pytestmark = pytest.mark.quick

ROWS = (
    Bar("dp2", (("state", 30e6), ("activations", 10e6))),
    Bar("pp2", (("state", 20e6),)),
)


def test_bars_are_on_one_scale_and_parts_have_a_legend() -> None:
    drawn = Bars(ROWS).html()
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", drawn)]
    assert widths == pytest.approx([75, 25, 50])
    assert re.findall(r"<b>([^<]+)</b>", drawn) == ["40 MB", "20 MB"]
    assert re.findall(r"</i>([^<]+)</span>", drawn) == ["state", "activations"]
    assert 'title="activations: 10 MB"' in drawn


def test_one_kind_of_part_needs_no_legend_and_nothing_is_still_a_picture() -> None:
    assert "key" not in Bars(ROWS[1:]).html()
    assert Bars(()).html() == '<div class="bars"></div>'
    assert "width:0.000%" in Bars((Bar("a", (("b", 0.0),)),)).html()


def test_names_are_text() -> None:
    drawn = Bars((Bar("<script>", (('"<b>', 1.0), ("b", 1.0))),)).html()
    assert "<script>" not in drawn and '"<b>' not in drawn and "&lt;script&gt;" in drawn


@pytest.mark.parametrize(
    ("words", "value", "expected"),
    [
        (size_words, 0, "0 B"),
        (size_words, 999.6, "1 kB"),
        (size_words, 5_940_000, "5.94 MB"),
        (size_words, 376e6, "376 MB"),
        (size_words, 83.4e9, "83.4 GB"),
        (size_words, 5e15, "5,000 TB"),
        (time_words, 0.0, "0 µs"),
        (time_words, 8.5e-4, "850 µs"),
        (time_words, 0.0132, "13.2 ms"),
        (time_words, 0.9998, "1 s"),
        (time_words, 402, "402 s"),
    ],
)
def test_a_number_has_the_unit_that_suits_it(words, value: float, expected: str) -> None:
    assert words(value) == expected
