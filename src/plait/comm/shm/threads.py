"""The fabric of threads in one process: every tensor is readable where it lies. For simulated
ranks, many and cheap.

The same collectives as between processes run on it (`collectives`), so what is proven on 64 threads
holds for 64 ranks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.shm.collectives import Direct
from plait.comm.shm.fabric import RING, Fabric, Header, InboundMessage, Signal, Staged
from plait.errors import RankFailed

LOOK_SECONDS = 0.1
CPU = torch.device("cpu")


class Hub:
    """The state that the threads share. `failed` names the rank that raised first; a rank that
    waits then fails too.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.failed: int | None = None
        self._lock = threading.Lock()
        self._lines: dict[object, ThreadGroup] = {}

    def line(self, key: object, size: int) -> ThreadGroup:
        """The meeting place of one line of `size` ranks."""
        with self._lock:
            if key not in self._lines:
                self._lines[key] = ThreadGroup(size)
            return self._lines[key]

    def fail(self, rank: int) -> None:
        """Let everyone who waits know."""
        with self._lock:
            self.failed = rank if self.failed is None else self.failed


class Inbox:
    """The signals and messages that have come for one rank of a line, under one lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._signals: Counter[tuple[Signal, int]] = Counter()
        self._messages: defaultdict[int, deque[InboundMessage]] = defaultdict(deque)

    def post(self, signal: Signal, source: int, message: InboundMessage | None = None) -> None:
        """Add one signal, and the message that it announces."""
        with self._changed:
            if message is not None:
                self._messages[source].append(message)
            self._signals[signal, source] += 1
            self._changed.notify()

    def take(self, signal: Signal, source: int, timeout_seconds: float = 0.0) -> bool:
        """Remove one signal, waiting for it as long as allowed; whether there was one."""
        key = (signal, source)
        with self._changed:
            if not self._signals[key] and not (
                timeout_seconds
                and self._changed.wait_for(lambda: self._signals[key], timeout_seconds)
            ):
                return False
            self._signals[key] -= 1
            return True

    def message(self, source: int) -> InboundMessage:
        """The next message, once its signal is taken."""
        with self._changed:
            return self._messages[source].popleft()


class ThreadGroup:
    """The meeting place of one line of `size` ranks."""

    def __init__(self, size: int) -> None:
        self.inboxes = [Inbox() for _ in range(size)]
        self.headers: dict[tuple[int, int], tuple[Header, Tensor | None]] = {}


@dataclass
class _OwnMemory(Staged):
    tensor: Tensor

    def release(self) -> None:
        """The garbage collector's."""


class _ThreadMessage(InboundMessage):
    def release(self) -> None:
        """The garbage collector's."""


class ThreadFabric(Fabric):
    """One thread's side of one line."""

    def __init__(
        self, hub: Hub, key: object, rank: int, size: int, device: torch.device = CPU
    ) -> None:
        self._device = device
        self.rank = rank
        self.size = size
        self._hub = hub
        self._line = hub.line(key, size)

    def post(self, signal: Signal, *to: int) -> None:
        """Add one for each."""
        for peer in to:
            self._line.inboxes[peer].post(signal, self.rank)

    def try_take(self, signal: Signal, source: int) -> bool:
        """Remove one if there is one."""
        return self._line.inboxes[self.rank].take(signal, source)

    def take(self, signal: Signal, source: int) -> None:
        """Wait for one, looking for failed threads in between.

        Raises:
            RankFailed: a thread failed, or the peer was silent for too long.
        """
        inbox = self._line.inboxes[self.rank]
        deadline = time.monotonic() + self._hub.timeout_seconds
        while not inbox.take(signal, source, LOOK_SECONDS):
            if self._hub.failed is not None:
                raise RankFailed(f"rank {self._hub.failed} failed")
            if time.monotonic() > deadline:
                raise RankFailed(
                    f"coordinate {source} of the axis was silent for {self._hub.timeout_seconds:g} "
                    "s"
                )

    def publish(self, header: Header, data: Tensor | None) -> None:
        """Put the tensor itself there."""
        self._line.headers[self.rank, header.number % RING] = (header, data)

    def read(self, peer: int, number: int) -> Header:
        """The peer's header."""
        return self._line.headers[peer, number % RING][0]

    def data(self, peer: int, header: Header) -> Tensor:
        """The peer's tensor."""
        data = self._line.headers[peer, header.number % RING][1]
        return torch.empty(0, dtype=header.dtype, device=self._device) if data is None else data

    def readable(self, tensor: Tensor) -> bool:
        """Always."""
        return True

    def stage(self, numel: int, dtype: torch.dtype) -> Staged:
        """New memory."""
        return _OwnMemory(torch.empty(numel, dtype=dtype, device=self._device))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """New memory."""
        return torch.empty(numel, dtype=dtype, device=self._device)

    def send_message(self, to: int, tag: int, flat: Tensor) -> None:
        """A copy into the inbox."""
        self._line.inboxes[to].post(Signal.MESSAGE, self.rank, _ThreadMessage(tag, flat.clone()))

    def next_message(self, source: int, block: bool) -> InboundMessage | None:
        """Out of the inbox."""
        if block:
            self.take(Signal.MESSAGE, source)
        elif not self.try_take(Signal.MESSAGE, source):
            return None
        return self._line.inboxes[self.rank].message(source)

    def close(self) -> None:
        """Nothing is owned."""


class Threads(Direct):
    """The operations of a line of threads."""
