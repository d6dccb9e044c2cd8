"""A `Work` is a communication under way: `wait` it, or `wait_all` of many at once.

It carries the name of its axis and operation, so that a failure names them. It closes its event in
the timeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from plait.comm.backends.base import Handle
from plait.comm.ledger import Ledger
from plait.doctor.flight import FlightRecorder
from plait.errors import RankFailed, RunError
from plait.paths import Paths
from plait.torch_internals import no_dispatch_modes
from plait.trace import CommEvent, Timeline


@dataclass
class Recorder:
    """The counters and the timeline of one rank. All its axes share them, so that a new timeline
    reaches all.
    """

    rank: int
    flight: FlightRecorder
    ledger: Ledger = field(default_factory=Ledger)
    timeline: Timeline = field(default_factory=lambda: Timeline(enabled=False))
    paths: Paths = field(default_factory=Paths)

    def note_by(self, flight: FlightRecorder, ledger: Ledger) -> None:
        """Report what this rank does to others too; before any axis is used."""
        self.flight = flight
        self.ledger = ledger


@dataclass(frozen=True)
class Label:
    """The name of an operation in errors and events."""

    axis: str
    op: str
    bytes: int
    ranks: tuple[int, ...]


# A class, since a generator takes longer, and messages are many.
class naming_failure:  # noqa: N801
    """Add axis, operation and peers to the bare fact that a backend raised; torch's RuntimeError
    becomes `RankFailed`.

    A backend's work is hidden from torch's dispatch modes. Its number of operations depends on when
    the peers come, and selective recomputation counts them.
    """

    __slots__ = ("_label", "_modes", "_rank")

    def __init__(self, label: Label, rank: int) -> None:
        self._label, self._rank, self._modes = label, rank, no_dispatch_modes()

    def __enter__(self) -> None:
        self._modes.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._modes.__exit__(kind, error, trace)
        label = self._label
        place = f"rank {self._rank}"
        if isinstance(error, RunError):
            raise type(error)(
                f"{place}: {label.op} on axis {label.axis} (ranks {list(label.ranks)}): {error}"
            ) from error
        if isinstance(error, RuntimeError):
            reason = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise RankFailed(
                f"{place}: {label.op} on axis {label.axis} failed; of its ranks "
                f"{list(label.ranks)} one died, "
                f"stopped answering or called another operation ({reason})"
            ) from error


class Waitable(Protocol):
    """The argument of `wait_all`: a `Work`, or an algorithm made of several."""

    def advance(self) -> bool:
        """Do the next part that comes before the last; whether another such part follows."""

    def wait(self) -> None:
        """Return when the result is there."""


class Work:
    """One communication under way. Works of one axis may be waited in any order; later ones
    complete earlier ones.
    """

    __slots__ = ("_entry", "_handle", "_label", "_recorder", "_start")

    def __init__(
        self, handle: Handle | None, label: Label, recorder: Recorder, entry: int = -1
    ) -> None:
        self._entry = entry
        self._handle = handle
        self._label = label
        self._recorder = recorder
        self._start = recorder.timeline.now() if recorder.timeline.enabled else 0.0

    def advance(self) -> bool:
        """Do the part of the work that needs no further answer of the peers; see `wait_all`."""
        if self._handle is not None:
            with naming_failure(self._label, self._recorder.rank):
                self._handle.advance()
        return False

    def wait(self) -> None:
        """Return when the result is there; a second call returns at once.

        Raises:
            RankFailed: a peer died, did not answer in time, or called something else.
        """
        if self._handle is None:
            return
        handle = self._handle
        self._handle = None
        timeline = self._recorder.timeline
        label = self._label
        began = timeline.now() if timeline.enabled else 0.0
        flight = self._recorder.flight
        waiting = flight.wait(self._entry)
        with naming_failure(label, self._recorder.rank):
            handle.wait()
        flight.ended(self._entry, waiting)
        if timeline.enabled:
            now = timeline.now()
            start = min(self._start, began)
            event = CommEvent(
                label.axis,
                label.op,
                label.bytes,
                start,
                now - start,
                self._recorder.rank,
                now - began,
            )
            timeline.add(event)


@contextmanager
def recorded(label: Label, recorder: Recorder) -> Iterator[None]:
    """Record and name an operation that is complete at the end of its call."""
    flight = recorder.flight
    entry = flight.issue(label.axis, label.op, label.ranks, label.bytes)
    began = flight.wait(entry)
    with naming_failure(label, recorder.rank):
        yield
    flight.ended(entry, began)


def wait_all(works: Iterable[Waitable]) -> None:
    """Wait for many. All do their first part before any does its second, and so on.

    That is faster than one after the other.
    """
    pending = list(works)
    advancing = pending
    while advancing:
        advancing = [work for work in advancing if work.advance()]
    for work in pending:
        work.wait()
