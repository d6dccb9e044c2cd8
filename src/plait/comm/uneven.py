"""Rows to ranks and back: the differentiable all-to-all with uneven splits, in two halves so that
there is time between.

`depart` issues the collective and returns memory that is not filled yet; `arrive` waits for it.
Backward is the way back, with the same two halves: the gradient of `arrive` issues it, the gradient
of `depart` waits. What is computed between the two in the forward has its backward between them
too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.comm.axis import Axis
from plait.comm.work import Work


class Flight:
    """One exchange of rows [R, ...] over an axis: `sent[k]` of them to rank k, `received[k]` from
    it.
    """

    def __init__(self, axis: Axis, sent: list[int], received: list[int]) -> None:
        self._axis = axis
        self.sent = sent
        self.received = received
        self._work: Work | None = None
        self.coming_home: Tensor | None = None

    def depart(self, rows: Tensor) -> Tensor:
        """Start; the result may only be given to `arrive`."""
        waiting: Tensor = _Depart.apply(rows, self)
        return waiting

    def arrive(self, waiting: Tensor) -> Tensor:
        """The rows that have come, in the order of the ranks that sent them."""
        rows: Tensor = _Arrive.apply(waiting, self)
        return rows

    def back(self) -> Flight:
        """The exchange that undoes this one."""
        return Flight(self._axis, self.received, self.sent)

    def _issue(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        self._work = self._axis.all_to_all(out, rows.contiguous(), received, sent)
        return out

    def _wait(self) -> None:
        assert self._work is not None  # issued by the other half
        self._work.wait()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight._issue(rows, flight.sent, flight.received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flight = ctx.flight
        flight._wait()
        home = flight.coming_home
        flight.coming_home = None
        return home, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, waiting: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight._wait()
        return waiting.view_as(waiting)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flight = ctx.flight
        flight.coming_home = flight._issue(grads[0], flight.received, flight.sent)
        return grads[
            0
        ], None  # of the shape that autograd expects; `_Depart` puts what comes home in its place
