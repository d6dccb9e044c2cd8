"""The server's side of `dpN:async-server`: gradients come from any thread at any time, updates are
made one by one.

What may be applied, and when, is said by `staleness.Versions`; here are the lock, the waiting and
the sums.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.outer.async_server.staleness import Applied, Versions
from plait.outer.driver import Change
from plait.outer.options import Asynchrony

LOOK_SECONDS = 0.5
REFUSED = -1


@dataclass(frozen=True)
class Push:
    """One worker's step: the sum of its gradients (numel,) over `count` tokens, the sum of their
    losses, and the step's number. `unused`: slots of the bucket that got no gradient.
    """

    step: int
    count: float
    loss_sum: float
    grad: Tensor
    unused: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Receipt:
    """An answer to a worker, beside the new weights.

    `staleness` is that of its own gradient, -1 when it was too late and not used. `loss_sum` and
    `tokens` are those of all updates so far. `steps` is the count of the furthest worker.
    """

    version: int
    staleness: int
    loss_sum: float
    tokens: float
    steps: int


class KeyServer:
    """The keys of one server: their sum of gradients, their version, and the workers that wait.

    `grad` is the flat buffer that the optimizer's pieces see. `apply` has the optimizer update the
    weights from it, but for the slots that no worker used. The functions `weights` give the weights
    as the workers hold them.
    """

    def __init__(
        self,
        num_workers: int,
        own: int,
        options: Asynchrony,
        grad: Tensor,
        apply: Callable[[Change, frozenset[int]], None],
    ) -> None:
        self._num_workers = num_workers
        self._own = own
        self._options = options
        self._grad = grad
        self.apply = apply
        self.versions = Versions(range(num_workers), options.stale)
        self.histogram: Counter[int] = Counter()  # gradients applied, by staleness
        self.num_refused = 0
        self.log: list[Applied] | None = (
            None  # every update, for replays; a list when it is asked for
        )
        self._pushes: dict[int, Push] = {}
        self._dealt_with: dict[
            int, int
        ] = {}  # the staleness of each gradient, until its worker asks
        self._loss_sum = 0.0
        self._tokens = 0.0
        self._steps = 0
        self._changed = threading.Condition()

    def push(self, worker: int, push: Push) -> None:
        """Take a gradient, and apply it as soon as that is allowed.

        The gradient of a worker that was given up as lost is not used: it may be too old. The
        worker is in again.
        """
        with self._changed:
            self._steps = max(self._steps, push.step + 1)
            if self.versions.holds(worker):
                self._pushes[worker] = push
                self._applied(self.versions.push(worker, push.step))
            else:
                self.num_refused += 1
                self.versions.join(worker)
                self._dealt_with[worker] = REFUSED

    def collect(self, worker: int, weights: Callable[[], Tensor]) -> tuple[Receipt, Tensor]:
        """Wait until the worker's gradient is applied; then its receipt, and the weights of now,
        flat (numel,): `weights()`, under the lock.

        Others may have been faster to the lock, so the version is taken here. The record is of the
        worker's own version.
        """
        with self._changed:
            deadline = time.monotonic() + self._options.patience_seconds
            while worker not in self._dealt_with:
                self._changed.wait(LOOK_SECONDS)
                if time.monotonic() > deadline:
                    for late in self.versions.holding_up:
                        self._applied(self.versions.leave(late))
            staleness = self._dealt_with.pop(worker)
            return self._receipt(self.versions.fetch(worker), staleness), weights()

    def join(self, worker: int, weights: Callable[[], Tensor]) -> tuple[Receipt, Tensor]:
        """Let a worker begin, or come back, with the weights of now, flat (numel,)."""
        with self._changed:
            self._forget(worker)
            return self._receipt(self.versions.join(worker), 0), weights()

    def leave(self, worker: int) -> None:
        """A worker rests, or is lost."""
        with self._changed:
            self._forget(worker)

    def forget(self, worker: int) -> None:
        """A worker will not ask what has become of its gradient."""
        with self._changed:
            self._dealt_with.pop(worker, None)

    def _forget(self, worker: int) -> None:
        """Take a worker out. Its gradient that waits here is not used, and those who wait for it
        learn so.
        """
        if self._pushes.pop(worker, None) is not None:
            self._dealt_with[worker] = REFUSED
            self._changed.notify_all()
        self._applied(self.versions.leave(worker))

    def _receipt(self, version: int, staleness: int) -> Receipt:
        return Receipt(version, staleness, self._loss_sum, self._tokens, self._steps)

    @torch.no_grad()
    def _applied(self, applied: Applied | None) -> None:
        """Make the update that has become possible: the mean over the tokens of all gradients in
        it.

        The rate is that of the synchronous step times the workers' share in the update. So the
        updates of one round of all workers add up to one synchronous step.
        """
        if applied is None:
            return
        ages = dict(zip((push.worker for push in applied.pushes), applied.staleness, strict=True))
        pushes = {
            worker: self._pushes.pop(worker)
            for worker in sorted(ages, key=lambda w: (w != self._own, w))
        }
        for index, push in enumerate(pushes.values()):
            (self._grad.copy_ if index == 0 else self._grad.add_)(push.grad)
        count = sum(push.count for push in pushes.values())
        inverse = self._options.staleness_rate == "inverse"
        share = sum(1 / (1 + age) if inverse else 1.0 for age in ages.values()) / self._num_workers
        if count:
            unused = frozenset.intersection(*(push.unused for push in pushes.values()))
            step = max(push.step for push in pushes.values())
            self.apply(Change(step, 1.0 / count, share), unused)
        self._loss_sum += sum(push.loss_sum for push in pushes.values())
        self._tokens += count
        self.histogram.update(ages.values())
        if self.log is not None:
            self.log.append(applied)
        for worker, age in ages.items():
            self._dealt_with[worker] = age
        self._changed.notify_all()
