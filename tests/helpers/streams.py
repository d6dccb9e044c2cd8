"""A device that does what it was asked late: streams and events, as `torch.cuda` has them.

What is asked of a stream waits in a queue. A stream runs when somebody waits for it, or at once
where it is eager. So a copy that does not wait for what it needs sees the wrong values.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class FakeStream:
    """A queue of work."""

    def __init__(self, device: FakeDevice, *, eager: bool) -> None:
        self._device = device
        self._eager = eager
        self._work: deque[Callable[[], None]] = deque()

    def ask(self, work: Callable[[], None]) -> None:
        """Have something done, after what was asked before."""
        with self._device.lock:
            self._work.append(work)
            if self._eager:
                self.run()

    def run(self) -> None:
        """Do all that was asked."""
        with self._device.lock:
            while self._work:
                self._work.popleft()()

    def wait_event(self, event: FakeEvent) -> None:
        """Do what is asked from here on after the event."""
        self.ask(event.happen)


class FakeEvent:
    """A moment of a stream."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._stream: FakeStream | None = None
        self._is_over = False

    def record(self, stream: FakeStream) -> None:
        """It is when the stream has done what it was asked until now."""
        self._stream = stream
        stream.ask(self._pass)

    def happen(self) -> None:
        """Have its stream come to it."""
        while not self._is_over:
            assert self._stream is not None
            self._stream.run()

    def synchronize(self) -> None:
        """Wait for it; all that the device was asked to compute is done first."""
        self._device.compute.run()
        self.happen()

    def _pass(self) -> None:
        self._is_over = True


class FakeDriver:
    """The driver's calls that pin memory, and its error, which stays until a kernel meets it.

    Attributes:
        pinned: the places of what is pinned.
        asked: the number of calls to pin.
        has_error: whether the next kernel fails.
    """

    def __init__(self, *, refuses: bool = False) -> None:
        self._refuses = refuses
        self.pinned: list[int] = []
        self.asked = 0
        self.has_error = False

    def cudaHostRegister(self, place: int, num_bytes: int, flags: int) -> int:
        """Pin memory; 0 where it is pinned."""
        self.asked += 1
        if self._refuses:
            self.has_error = True
            return 801
        self.pinned.append(place)
        return 0

    def cudaHostUnregister(self, place: int) -> int:
        """Give memory free that is pinned."""
        self.pinned.remove(place)
        return 0


class FakeDevice:
    """The streams of a device. `eager`: copies begin at once, not as late as they may.

    Without a `driver` its memory is the host's, and none is pinned.

    Attributes:
        compute: the stream of the steps.
        lock: held while anything runs.
    """

    def __init__(self, *, eager: bool, driver: FakeDriver | None = None) -> None:
        self._driver = driver
        self.lock = threading.RLock()
        self._eager = eager
        self.compute = FakeStream(self, eager=False)
        self._own = threading.local()

    @property
    def current(self) -> FakeStream:
        """The stream that this thread asks now."""
        stream: FakeStream = getattr(self._own, "stream", self.compute)
        return stream

    def Stream(self, device: Any) -> FakeStream:
        """Another stream."""
        return FakeStream(self, eager=self._eager)

    def Event(self, *, blocking: bool = False) -> FakeEvent:
        """An event that is nowhere yet."""
        return FakeEvent(self)

    def current_stream(self, device: Any) -> FakeStream:
        """The stream that this thread asks now."""
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Ask this stream inside."""
        before = self.current
        self._own.stream = stream
        yield
        self._own.stream = before

    def is_available(self) -> bool:
        """Whether it can pin memory."""
        return self._driver is not None

    def cudart(self) -> FakeDriver:
        """Its driver."""
        assert self._driver is not None
        return self._driver
