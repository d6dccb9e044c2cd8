"""A composite answers every moment of the contract itself: none falls back to the base class."""

from __future__ import annotations

from plait.parallel.data import Composite, DataStrategy


def test_a_composite_forgets_no_moment() -> None:
    public = {name for name in vars(DataStrategy) if not name.startswith("_")}
    assert public <= vars(Composite).keys()
    assert len(public) <= 14
