"""The engine of the direct collectives: operations as short lists of steps, done in order, none
before its signals came.

A step waits for one kind of signal from some peers, acts, then posts. Nothing runs in the
background: steps are done inside the calls of issue, `advance` and `wait`. So ranks that outnumber
the cores do not fight for them.

Why it cannot deadlock, whatever the ranks wait for first: signals of one kind are taken in order of
issue. A rank blocks only on its earliest operation that is not ready. Take the smallest such
operation over all ranks. Every other rank has issued it (or is not blocked) and is at that step of
it or later. So it has posted the signal that is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from plait.comm.backends.base import Handle
from plait.comm.shm.fabric import RING, Fabric, Signal


@dataclass
class ProtocolStep:
    """Take `signal` from each of `sources`; then `act`; then post `answer` to each of `targets`."""

    signal: Signal
    sources: tuple[int, ...]
    act: Callable[[], object] | None = None
    answer: Signal = Signal.EXIT
    targets: tuple[int, ...] = ()


class Operation(Handle):
    """One operation under way. It is ready when its result is there and its tensors are free again.

    With `early` it is ready before its last step: peers still read only borrowed memory.
    """

    def __init__(self, engine: ProgressEngine, steps: Iterable[ProtocolStep], early: bool) -> None:
        self._engine = engine
        self._steps = deque(steps)
        self._num_ready = 1 if early else 0
        self._missing: set[int] = set()
        self._enter()

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return len(self._steps) <= self._num_ready

    @property
    def done(self) -> bool:
        """Whether no step is left."""
        return not self._steps

    @property
    def signal(self) -> Signal:
        """The signal that the next step waits for."""
        return self._steps[0].signal

    def wait(self) -> None:
        """Complete it, and whatever came before it."""
        self._engine.complete(self)

    def advance(self) -> None:
        """Do what can be done without blocking."""
        self._engine.sweep()

    def attempt(self, fabric: Fabric) -> bool:
        """Do the next step if all its signals are there."""
        signal = self.signal
        self._missing = {peer for peer in self._missing if not fabric.try_take(signal, peer)}
        if self._missing:
            return False
        self._do(fabric)
        return True

    def block(self, fabric: Fabric) -> None:
        """Wait for the signals of the next step, and do it."""
        while self._missing:
            fabric.take(self.signal, min(self._missing))
            self._missing.remove(min(self._missing))
        self._do(fabric)

    def _do(self, fabric: Fabric) -> None:
        step = self._steps[0]
        if step.act is not None:
            step.act()
        fabric.post(step.answer, *step.targets)
        self._steps.popleft()
        self._enter()

    def _enter(self) -> None:
        self._missing = set(self._steps[0].sources) if self._steps else set()


class ProgressEngine:
    """The operations of one axis that are under way, in order of issue."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._pending: deque[Operation] = deque()
        self.number = 0

    def next_number(self) -> int:
        """The number of the operation to be issued; makes room for its header first."""
        while len(self._pending) >= RING:
            self._pending[0].block(self._fabric)
            self._retire()
        self.number += 1
        return self.number

    def issue(self, steps: Iterable[ProtocolStep], early: bool = False) -> Operation:
        """Take up an operation whose header is published and whose arrival is posted."""
        self.sweep()
        operation = Operation(self, steps, early)
        self._pending.append(operation)
        return operation

    def sweep(self) -> None:
        """Do every step whose signals are there."""
        passed = len(Signal)  # earlier operations take no signal before this one any more
        for operation in self._pending:
            while (
                not operation.done and operation.signal < passed and operation.attempt(self._fabric)
            ):
                pass
            passed = passed if operation.done else min(passed, operation.signal)
        self._retire()

    def complete(self, operation: Operation) -> None:
        """Do steps until `operation` is ready, blocking on the earliest that is not."""
        self.sweep()
        while not operation.ready:
            earliest = next(other for other in self._pending if not other.ready)
            head = next(
                other
                for other in self._pending
                if not other.done and other.signal == earliest.signal
            )
            head.block(self._fabric)
            self.sweep()

    def drain(self) -> None:
        """Complete everything, to the last signal."""
        while self._pending:
            self._pending[0].block(self._fabric)
            self._retire()

    def _retire(self) -> None:
        while self._pending and self._pending[0].done:
            self._pending.popleft()
