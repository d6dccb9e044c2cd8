"""Rows of a parametrized test of which most are long ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")


def long_but(usual: Collection[Row], rows: Sequence[Row]) -> list[Any]:
    """The rows in their order; those that are not among the `usual` ones are long."""
    assert set(usual) <= set(rows)
    return [row if row in usual else pytest.param(row, marks=pytest.mark.long) for row in rows]
