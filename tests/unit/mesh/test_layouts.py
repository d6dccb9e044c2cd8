"""The four letters: duals and text."""

from __future__ import annotations

import pytest

from plait.errors import PlanError
from plait.mesh import INVARIANT, PARTIAL, REPLICATED, Layout, Sharded

ALL = [REPLICATED, INVARIANT, PARTIAL, Sharded(0), Sharded(3), Sharded(-1)]


def test_duals():
    assert [str(layout.dual()) for layout in ALL] == ["P", "I", "R", "S(0)", "S(3)", "S(-1)"]


@pytest.mark.parametrize("layout", ALL)
def test_the_dual_of_the_dual_is_the_layout(layout):
    assert layout.dual().dual() == layout


@pytest.mark.parametrize("layout", ALL)
def test_text_round_trips(layout):
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("text", ["", "Q", "S", "S()", "S(x)", "r", "S(1.0)"])
def test_other_text_is_refused(text):
    with pytest.raises(PlanError, match="is no layout"):
        Layout.parse(text)
