"""A clock for every rank, told from rank to rank with the messages: what a run would take if no
rank lacked a core.

A rank's clock goes on by what its actions cost, and a message carries its sender's clock as it
leaves: who waits goes on from there, if that is later than the own (Lamport's clocks). Order,
messages and waits are those of the real run on the real ranks; only the time that an action takes
is chosen: the literature's, or the CPU time of the thread that does it. So four ranks on two cores,
or on cores that others use too, give the times of four cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.comm import Work
from plait.parallel.pipeline.actions import Action, Kind
from plait.parallel.pipeline.payload import TensorForm
from plait.parallel.pipeline.transport import Form, Transport, _Arrival
from plait.trace import Span, Timeline

Cost = Callable[[Action, float], float]
"""From an action and the CPU seconds that it took, its seconds on the clock."""


@dataclass
class Clock:
    """The time of one rank, and what it did when."""

    rank: int
    cost: Cost
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)
    _action: Action | None = None
    _began: float = 0.0  # CPU time of the thread when the action under way began

    def hear(self, sent_at: float) -> None:
        """A message that was waited for has come."""
        self.now = max(self.now, sent_at)

    @property
    def inside(self) -> float:
        """The time in the middle of an action: what leaves a rank now has cost it what was done of
        the action so far.
        """
        return (
            self.now
            if self._action is None
            else self.now + self.cost(self._action, time.thread_time() - self._began)
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What keeping time itself takes costs the action under way nothing."""
        began = time.thread_time()
        yield
        self._began += time.thread_time() - began

    def timed(self, handler: Callable[[Action], None]) -> Callable[[Action], None]:
        """The same handler, on the clock: it takes its messages first, then it costs."""

        def handle(action: Action) -> None:
            self._action, self._began = action, time.thread_time()
            handler(action)
            seconds = self.cost(action, time.thread_time() - self._began)
            self._action = None
            if seconds:
                self.spans.append(
                    Span(str(action), action.kind.value, self.rank, self.now, seconds)
                )
            self.now += seconds

        return handle

    def take_step(self, *, restart: bool) -> Timeline:
        """What was done since the last call; with `restart` the next step begins at zero, on every
        rank.
        """
        step = Timeline(self.rank, origin_seconds=0.0)
        step.spans = self.spans
        self.spans = []
        self.now = 0.0 if restart else self.now
        return step


@dataclass(kw_only=True)
class _Stamped(_Arrival):
    stamp: Tensor
    stamp_work: Work
    clock: Clock

    def wait(self) -> list[Tensor]:
        tensors = super().wait()
        with self.clock.aside():
            self.stamp_work.wait()
            self.clock.hear(float(self.stamp))
        return tensors


class StampedTransport(Transport):
    """Every message is followed by the time at which it was sent."""

    clock: Clock

    @classmethod
    def over(cls, plain: Transport, clock: Clock) -> StampedTransport:
        """In place of a transport that has not been used yet."""
        made = cls(plain._axis, plain.placement, plain._device)
        made.clock = clock
        made.gradient_extras = plain.gradient_extras
        return made

    def _send(self, tensors: Sequence[Tensor], to: int) -> None:
        super()._send(tensors, to)
        stamp = torch.tensor(self.clock.inside, dtype=torch.float64)
        with self.clock.aside():
            super()._send([stamp], to)

    def _post(self, form: Form, wanted: Sequence[TensorForm], source: int) -> _Arrival:
        arrival = super()._post(form, wanted, source)
        with self.clock.aside():
            stamp = torch.empty((), dtype=torch.float64)
            return _Stamped(
                arrival.tensors,
                arrival.works,
                form,
                arrival.laid,
                stamp=stamp,
                stamp_work=self._axis.receive(stamp, source),
                clock=self.clock,
            )

    def _receive_form(self, source: int) -> Form:
        form = super()._receive_form(source)
        self._axis.receive(torch.empty((), dtype=torch.float64), source).wait()
        return form


def put_on_clock(engine: Any, cost: Cost) -> Clock:
    """Let an engine that has done no step yet keep time; all its ranks must."""
    clock = Clock(engine.world.axis("pp").rank, cost)
    step = engine._training_step
    pipeline = engine.pipeline
    pipeline.transport = StampedTransport.over(pipeline.transport, clock)
    table = {
        **step._handlers,
        **pipeline.handlers(),
        Kind.REDUCE: step._reduce,
        Kind.UPDATE: step._update,
    }
    timed = step.timing.handlers(table)
    step._handlers = {kind: clock.timed(handler) for kind, handler in timed.items()}
    return clock
