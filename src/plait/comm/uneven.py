"""The differentiable all-to-all of rows with uneven splits, in two halves.

`start` issues the collective and returns memory that is not filled yet; `wait` waits for it. The
backward of `wait` issues the inverse exchange; the backward of `start` waits for it. So work
between the two halves has its backward between them too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.comm.axis import Axis
from plait.comm.work import Work
from plait.values import AutogradContext


class UnevenAllToAll:
    """One exchange of rows (R, ...) over an axis: `sent[k]` of them to rank k, `received[k]` from
    it.

    R is the sum of `sent`; the sum of `received` comes. Collective, forward and backward.
    """

    def __init__(self, axis: Axis, sent: list[int], received: list[int]) -> None:
        self._axis = axis
        self.sent = sent
        self.received = received
        self._work: Work | None = None
        self._gradient: Tensor | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Start with rows (sum of `sent`, ...). The result (sum of `received`, ...) is not filled
        yet: it may only be given to `wait`.
        """
        waiting: Tensor = _Start.apply(rows, self)
        return waiting

    def wait(self, waiting: Tensor) -> Tensor:
        """The rows (sum of `received`, ...) that have come, in the order of the ranks that sent
        them.
        """
        rows: Tensor = _Wait.apply(waiting, self)
        return rows

    def inverse(self) -> UnevenAllToAll:
        """The exchange that undoes this one."""
        return UnevenAllToAll(self._axis, self.received, self.sent)

    def _issue(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        self._work = self._axis.all_to_all(out, rows.contiguous(), received, sent)
        return out

    def _start_gradient(self, grad: Tensor) -> None:
        """Send a gradient back; `_take_gradient` waits for what comes."""
        self._gradient = self._issue(grad, self.received, self.sent)

    def _take_gradient(self) -> Tensor | None:
        self._wait()
        gradient = self._gradient
        self._gradient = None
        return gradient

    def _wait(self) -> None:
        assert self._work is not None  # issued by the other half
        self._work.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, exchange: UnevenAllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange._issue(rows, exchange.sent, exchange.received)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        return exchange._take_gradient(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, waiting: Tensor, exchange: UnevenAllToAll) -> Tensor:
        ctx.exchange = exchange
        exchange._wait()
        return waiting.view_as(waiting)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        exchange._start_gradient(grads[0])
        # A gradient of the shape that autograd expects; `_Start` puts the received one in its
        # place.
        return grads[0], None
