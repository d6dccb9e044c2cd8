"""A pytest plugin with one fixture, `plait_parity`: is this training step right on several ranks?

It is found by pytest where plait is installed, and loads nothing until a test asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from plait.values import PyTree

if TYPE_CHECKING:
    from plait.verify.report import Report


@pytest.fixture(scope="session")
def plait_parity() -> Callable[..., Report]:
    """A function that runs a training step on new ranks and on one device, and compares them.

    `plait_parity(make, train_step, prepare=None, nproc=2, steps=3)` takes the functions of
    `plait verify --step`. It returns the report, and fails the test where the two differ.
    """
    return parity


def parity(
    make: Callable[[], PyTree],
    train_step: Callable[..., PyTree],
    prepare: Callable[[PyTree], PyTree] | None = None,
    *,
    nproc: int = 2,
    steps: int = 3,
    dtype: str = "float64",
    tolerance: float | None = None,
) -> Report:
    """The report of an equal step. Errors: `AssertionError`, with the report of one that is not."""
    __tracebackhide__ = True
    from plait.verify.outside.source import carried
    from plait.verify.outside.task import Trial
    from plait.verify.outside.trial import check

    source = carried(make, train_step, prepare)
    report = check(Trial(source, steps, dtype, tolerance), nproc)
    if not report.ok:
        raise AssertionError(report.text())
    return report
