"""The sums of a step over all ranks: made on the device, and read by the host once or later."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from plait.engine.loss import LossTotals
from plait.parallel.data.gather_order import GatherOrder

LOSS, COUNT, SQUARED_NORM, TOKENS, NUM_GRAPHS, LOSS_DIVISOR = range(6)
NUM_TOTALS = 6
PAGES = 2


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
        """The numbers that the host knows of this rank, behind those that its device knows.

        The place of the loss's divisor is 0, as no sum is taken of it.
        """
        marks = [mark for order in self.orders for mark in order.marks()]
        return [num_graphs, 0.0, *map(float, self.used), *marks]

    def note_orders(self, sums: Tensor) -> None:
        """Have a total of sums [n] be no number where ranks of a stage gathered in other orders.

        So it is none on all stages, once they have added theirs.
        """
        if self.orders:
            marks = sums[NUM_TOTALS + len(self.used) :].view(-1, 3)
            differ = (marks[:, 0] * marks[:, 2] != marks[:, 1] ** 2).any()
            sums[NUM_GRAPHS].masked_fill_(differ, math.nan)


class HostPages:
    """Pinned memory of the host, where numbers of a device arrive while it works on.

    Numbers are read in the order in which they were sent, each before the one after the next is.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._pages: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def send(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Begin to copy numbers [n] in float64; the answer waits for these alone, and reads."""
        if not self._is_gpu:
            return partial(_arrived, numbers)
        if len(self._pages) < PAGES:
            page, copied = torch.empty(0, dtype=numbers.dtype), torch.cuda.Event()
        else:
            page, copied = self._pages.popleft()
        if page.shape != numbers.shape:
            page = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._pages.append((page, copied))
        page.copy_(numbers, non_blocking=True)
        copied.record()
        return partial(_arrived, page, copied)


def _arrived(page: Tensor, copied: torch.cuda.Event | None = None) -> list[float]:
    """The numbers [n] of a page, once they are there."""
    if copied is not None:
        copied.synchronize()
    numbers: list[float] = page.tolist()
    return numbers


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
        self._arrival: Callable[[], list[float]] | None = None

    def send(self, pages: HostPages, *others: Tensor) -> None:
        """Begin to copy the sums to the host, with other tensors [...] of float64 behind them."""
        self._arrival = pages.send(torch.cat([self.values, *(one.view(-1) for one in others)]))

    def read(self) -> list[float]:
        """All that was sent to the host, else the sums.

        For these the host waits until its device has done all that it was asked for.
        """
        return self.values.tolist() if self._arrival is None else self._arrival()

    def sound(self) -> Tensor:
        """Whether a step may update: 0-dim, without a read.

        It may where loss and norm are finite, and something was counted. Also, a loss must have a
        gradient, and all ranks must have gathered in one order.
        """
        nothing = self.values[:NUM_TOTALS].sum() * 0.0  # no number, where a total is none
        return torch.addcmul(nothing, self.values[COUNT], self.values[NUM_GRAPHS]) > 0


def totals_of(values: Sequence[float]) -> LossTotals:
    """The totals that sums begin with."""
    loss_sum, count, squared_norm, tokens, num_graphs, divisor = values[:NUM_TOTALS]
    each = tokens / count if count else 1.0
    return LossTotals(loss_sum, count, squared_norm, each, num_graphs, divisor)


def check_orders(values: Sequence[float], layout: SumsLayout) -> None:
    """Raise `ModelError` where ranks have gathered in different orders."""
    marks = values[NUM_TOTALS + len(layout.used) :]
    for number, order in enumerate(layout.orders):
        order.check(marks[3 * number : 3 * number + 3])


def unused(values: Sequence[float], layout: SumsLayout) -> list[int]:
    """The parameters, by index, of which no rank has computed a gradient."""
    flags = values[NUM_TOTALS : NUM_TOTALS + len(layout.used)]
    return [index for index, flag in enumerate(flags) if flag <= 0]
