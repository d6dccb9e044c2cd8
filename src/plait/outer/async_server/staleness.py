"""Bounded staleness: which gradients a server may apply, and which must wait. Pure: no clock, no
thread, no tensor.

The version of the weights is the number of updates made. A worker holds the version that it got
last. The bound K says that no gradient is ever older than K updates when it is applied. A gradient
that was computed on version v may be part of the updates to v + 1 ... v + K + 1, no later. Hence
one rule:

    waiting gradients are applied at once, as one update, as soon as that leaves no computing worker
    behind.

With K = 0 that is when all have come, and their sum is one update: the synchronous server. With K
at least the largest lag that ever occurs, every gradient is applied alone and no worker waits. In
between the fast wait for the slowest, and what has waited together is applied together. There is no
deadlock: the worker that holds up the others is computing.

J. Dean et al., Large Scale Distributed Deep Networks (NIPS 2012). Q. Ho et al., More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server (NIPS 2013). Their bound is on
clocks of workers; here it is on the weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pushed:
    """One gradient: the worker, its step, and the version of the weights that it was computed
    on.
    """

    worker: int
    step: int
    base: int


@dataclass(frozen=True)
class Applied:
    """One update: the version that it made, and the gradients in it, by worker."""

    version: int
    pushes: tuple[Pushed, ...]

    @property
    def staleness(self) -> tuple[int, ...]:
        """Updates made since the weights of each gradient were fetched."""
        return tuple(self.version - 1 - push.base for push in self.pushes)


class Versions:
    """The versions that the workers of one server hold."""

    def __init__(self, workers: range | list[int], bound: int) -> None:
        self.bound = bound
        self.version = 0
        self._base = dict.fromkeys(workers, 0)
        self._waiting: dict[int, Pushed] = {}

    @property
    def holding_up(self) -> list[int]:
        """The workers that what waits is waiting for."""
        if not self._waiting:
            return []
        oldest = self.version + 1 - self.bound
        return [
            worker
            for worker, base in self._base.items()
            if worker not in self._waiting and base < oldest
        ]

    def push(self, worker: int, step: int) -> Applied | None:
        """A gradient has come. The update that can be made now, if there is one. A worker that is
        not in is refused.

        Raises:
            ValueError: the worker has no weights.
        """
        if worker not in self._base or worker in self._waiting:
            raise ValueError(f"worker {worker} has no weights to have a gradient of")
        self._waiting[worker] = Pushed(worker, step, self._base[worker])
        return self._apply()

    def leave(self, worker: int) -> Applied | None:
        """A worker pauses or is lost: no other waits for it, and its gradient, if one waits, is
        forgotten.
        """
        self._base.pop(worker, None)
        self._waiting.pop(worker, None)
        return self._apply()

    def join(self, worker: int) -> int:
        """A worker comes, or comes back; the version that it gets."""
        if worker not in self._base:
            self._base[worker] = self.version
        return self._base[worker]

    def fetch(self, worker: int) -> int:
        """A worker that is in gets the weights of now; their version."""
        self._base[worker] = self.version
        return self.version

    def holds(self, worker: int) -> bool:
        """Whether the worker is in, and has weights."""
        return worker in self._base

    def _apply(self) -> Applied | None:
        if not self._waiting or self.holding_up:
            return None
        pushes = tuple(self._waiting[worker] for worker in sorted(self._waiting))
        self.version += 1
        for worker in self._waiting:
            self._base[worker] = self.version
        self._waiting.clear()
        return Applied(self.version, pushes)
