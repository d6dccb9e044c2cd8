"""The sums of a step over all ranks: made on the device, and read by the host once or later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.engine.loss import LossTotals
from plait.parallel.data.gather_order import GatherOrder

LOSS, COUNT, SQUARED_NORM, TOKENS, NUM_GRAPHS = range(5)
NUM_TOTALS = 5


@dataclass(frozen=True)
class SumsLayout:
    """The numbers behind the totals: flags of use by parameter, then marks of gathers.

    Attributes:
        used: whether this rank has computed a gradient of each parameter.
        orders: the orders of this rank's gathers, of which each has three marks.
        rounds: loss and norm are rounded to float32, where all ranks are to have equal bits.
    """

    used: Sequence[bool]
    orders: Sequence[GatherOrder]
    rounds: bool

    def numbers(self, num_graphs: float) -> list[float]:
        """This rank's numbers, with zeros for the totals that its device knows."""
        marks = [mark for order in self.orders for mark in order.marks()]
        return [0.0, 0.0, 0.0, 0.0, num_graphs, *map(float, self.used), *marks]


class StepSums:
    """The sums [n] of one step over all ranks, in float64 on the device of the rank.

    Attributes:
        values: the sums.
        layout: what they are.
        own_norm: this rank's share of the squared norm, 0-dim.
    """

    def __init__(self, values: Tensor, layout: SumsLayout, own_norm: Tensor) -> None:
        if layout.rounds:
            values[LOSS] = values[LOSS].float()
            values[SQUARED_NORM] = values[SQUARED_NORM].float()
        self.values = values
        self.layout = layout
        self.own_norm = own_norm
        self._copy: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def send_to_host(self, *others: Tensor) -> None:
        """Begin to copy the sums to the host, with other tensors [...] of float64 behind them."""
        if not others and self.values.device.type == "cpu":
            self._copy = self.values
            return
        whole = torch.cat([self.values, *(one.reshape(-1) for one in others)])
        if whole.device.type != "cuda":
            self._copy = whole
            return
        self._copy = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
        self._copy.copy_(whole, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def read(self) -> list[float]:
        """All that was sent to the host, else the sums.

        For these the host waits until its device has done all that it was asked for.
        """
        return self.values.tolist() if self._copy is None else self._arrived(self._copy)

    def _arrived(self, copy: Tensor) -> list[float]:
        """The copy [...], once it is there. The host waits for this step alone."""
        if self._copied is not None:
            self._copied.synchronize()
        return copy.tolist()

    def sound(self) -> Tensor:
        """Whether a step may update: 1.0 or 0.0, 0-dim in float64, without a read.

        It may where loss and norm are finite, and something was counted. Also, a loss must have a
        gradient, and all ranks must have gathered in one order.
        """
        finite = torch.isfinite(self.values[LOSS]) & torch.isfinite(self.values[SQUARED_NORM])
        sound = finite & (self.values[COUNT] > 0) & (self.values[NUM_GRAPHS] > 0)
        if self.layout.orders:
            marks = self.values[NUM_TOTALS + len(self.layout.used) :].view(-1, 3)
            sound &= (marks[:, 0] * marks[:, 2] == marks[:, 1] ** 2).all()
        return sound.double()


def totals_of(values: Sequence[float]) -> LossTotals:
    """The totals that sums begin with."""
    loss_sum, count, squared_norm, tokens, num_graphs = values[:NUM_TOTALS]
    return LossTotals(loss_sum, count, squared_norm, tokens / count if count else 1.0, num_graphs)


def check_orders(values: Sequence[float], layout: SumsLayout) -> None:
    """Raise `ModelError` where ranks have gathered in different orders."""
    marks = values[NUM_TOTALS + len(layout.used) :]
    for number, order in enumerate(layout.orders):
        order.check(marks[3 * number : 3 * number + 3])


def unused(values: Sequence[float], layout: SumsLayout) -> list[int]:
    """The parameters, by index, of which no rank has computed a gradient."""
    flags = values[NUM_TOTALS : NUM_TOTALS + len(layout.used)]
    return [index for index, flag in enumerate(flags) if flag <= 0]
