"""No circles of imports inside a room, lazy imports and those for types included."""

from __future__ import annotations

from benchmarks.house.text import import_circles


def test_no_modules_import_each_other_in_a_circle() -> None:
    circles = import_circles()
    assert not circles, "\n".join(" <-> ".join(circle) for circle in circles)
