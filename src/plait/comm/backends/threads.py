"""The fabric of threads in one process: every tensor is readable where it lies. For simulated ranks, many and cheap.

The same collectives as between processes run on it (`direct`), so what is proven on 64 threads holds for 64 ranks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.backends.direct import Direct
from plait.comm.backends.fabric import RING, Fabric, Message, Notice, Signal, Staged
from plait.errors import RankFailed

LOOK_SECONDS = 0.1


class Hub:
    """What the threads share. `failed` names the rank that raised first; whoever waits then fails too."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.failed: int | None = None
        self._lock = threading.Lock()
        self._lines: dict[object, Line] = {}

    def line(self, key: object) -> Line:
        """The meeting place of one line of ranks."""
        with self._lock:
            return self._lines.setdefault(key, Line())

    def fail(self, rank: int) -> None:
        """Let everyone who waits know."""
        with self._lock:
            self.failed = rank if self.failed is None else self.failed


class Line:
    """Signals, notices and messages of one line; the dictionaries make their entries under a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._signals: defaultdict[tuple[int, int, int], threading.Semaphore] = defaultdict(lambda: threading.Semaphore(0))
        self._boxes: defaultdict[tuple[int, int], queue.SimpleQueue[Message]] = defaultdict(queue.SimpleQueue)
        self.notices: dict[tuple[int, int], tuple[Notice, Tensor | None]] = {}

    def signal(self, key: tuple[int, int, int]) -> threading.Semaphore:
        """The counter of (signal, from, to)."""
        with self._lock:
            return self._signals[key]

    def box(self, key: tuple[int, int]) -> queue.SimpleQueue[Message]:
        """The messages of (from, to)."""
        with self._lock:
            return self._boxes[key]


@dataclass
class _Own(Staged):
    tensor: Tensor

    def release(self) -> None:
        """The garbage collector's."""


class _Letter(Message):
    def release(self) -> None:
        """The garbage collector's."""


class ThreadFabric(Fabric):
    """One thread's side of one line."""

    def __init__(self, hub: Hub, key: object, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._hub = hub
        self._line = hub.line(key)

    def post(self, signal: Signal, to: int) -> None:
        """Add one."""
        self._line.signal((signal, self.rank, to)).release()

    def try_take(self, signal: Signal, source: int) -> bool:
        """Remove one if there is one."""
        return self._line.signal((signal, source, self.rank)).acquire(blocking=False)

    def take(self, signal: Signal, source: int) -> None:
        """Wait for one, looking for failed threads in between."""
        counter, deadline = self._line.signal((signal, source, self.rank)), time.monotonic() + self._hub.timeout_seconds
        while not counter.acquire(timeout=LOOK_SECONDS):
            if self._hub.failed is not None:
                raise RankFailed(f"rank {self._hub.failed} failed")
            if time.monotonic() > deadline:
                raise RankFailed(f"coordinate {source} of the axis was silent for {self._hub.timeout_seconds:g} s")

    def publish(self, notice: Notice, data: Tensor | None) -> None:
        """Put the tensor itself there."""
        self._line.notices[self.rank, notice.number % RING] = (notice, data)

    def read(self, peer: int, number: int) -> Notice:
        """The peer's notice."""
        return self._line.notices[peer, number % RING][0]

    def data(self, peer: int, notice: Notice) -> Tensor:
        """The peer's tensor."""
        data = self._line.notices[peer, notice.number % RING][1]
        return torch.empty(0, dtype=notice.dtype) if data is None else data

    def readable(self, tensor: Tensor) -> bool:
        """Always."""
        return True

    def stage(self, numel: int, dtype: torch.dtype) -> Staged:
        """New memory."""
        return _Own(torch.empty(numel, dtype=dtype))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """New memory."""
        return torch.empty(numel, dtype=dtype)

    def send_message(self, to: int, tag: int, flat: Tensor) -> None:
        """A copy into the box."""
        self._line.box((self.rank, to)).put(_Letter(tag, flat.clone()))
        self.post(Signal.MESSAGE, to)

    def next_message(self, source: int, block: bool) -> Message | None:
        """Out of the box."""
        if block:
            self.take(Signal.MESSAGE, source)
        elif not self.try_take(Signal.MESSAGE, source):
            return None
        return self._line.box((source, self.rank)).get()

    def close(self) -> None:
        """Nothing is owned."""


class Threads(Direct):
    """The operations of a line of threads."""
