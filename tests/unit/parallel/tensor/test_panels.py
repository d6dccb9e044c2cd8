"""SUMMA's panels: the next ones are on their way before the current ones are handed out, and two of
each are all there are.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm import World
from plait.parallel.tensor import summa
from plait.parallel.tensor.group import ActivationLayout, ForwardContext
from plait.parallel.tensor.products import PanelMove
from tests.helpers.threaded import threaded


class Line:
    """An axis that notes what is asked of it."""

    def __init__(self, size: int, rank: int, notes: list[str]) -> None:
        self.size = size
        self.rank = rank
        self._notes = notes
        self.panels: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def broadcast(self, panel: Tensor, root: int) -> Any:
        self._notes.append(f"send {root}")
        if root != self.rank:
            self.panels.add(panel)
        return self

    def wait(self) -> None:
        self._notes.append("wait")


def test_the_next_panels_travel_while_the_current_ones_multiply() -> None:
    notes: list[str] = []
    line: Any = Line(4, 3, notes)
    most = 0
    for t, _ in summa.panels([(line, torch.zeros(3, 2))]):
        notes.append(f"multiply {t}")
        gc.collect()
        most = max(most, len(line.panels))
    assert notes == [
        "send 0", "send 1", "wait", "multiply 0", "send 2", "wait", "multiply 1", "send 3", "wait",
        "multiply 2",
        "wait", "multiply 3",
    ]  # fmt: skip
    assert most == 2


def test_one_sum_travels_while_the_next_is_made() -> None:
    notes: list[str] = []

    class Summing(Line):
        def reduce(self, partial: Tensor, root: int) -> Any:
            notes.append(f"sum {root}")
            return self

    sums = summa.Sums(Summing(3, 1, notes))  # type: ignore[arg-type]
    for t in range(3):
        notes.append(f"multiply {t}")
        sums.add(t, torch.full((2,), float(t)))
    assert sums.finish()[0] == 1
    assert notes == [
        "multiply 0",
        "sum 0",
        "multiply 1",
        "wait",
        "sum 1",
        "multiply 2",
        "wait",
        "sum 2",
        "wait",
    ]


@pytest.mark.parametrize(
    ("limit", "choice"), [(2 * (6 + 8) * 8, "gathered"), (2 * (6 + 8) * 8 - 1, "streamed")]
)
def test_the_choice_is_made_by_size_and_recorded(limit: int, choice: str) -> None:
    def rank(world: World) -> dict[str, int]:
        row = world.axis("tp_row")
        column = world.axis("tp_col")
        run = ForwardContext(ActivationLayout())
        product = summa.Summa(x=PanelMove(column, -1), weight=PanelMove(row, 1), limit_bytes=limit)
        product(
            torch.ones(3, 2, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64), None, run
        )
        return dict(run.choices)

    assert threaded(4, rank, plan="tp4:2d") == [{choice: 1}] * 4
