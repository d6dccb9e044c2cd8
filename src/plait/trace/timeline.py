"""The timeline: collects records of one rank (or of all, once merged).

Disabled it costs one attribute test for each record, so that the same code runs measured and
unmeasured. The clock is `perf_counter`, which all processes of a host share. So timelines of ranks
on one host need only one common origin.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from plait.trace.chrome import from_chrome, to_chrome
from plait.trace.records import CommEvent, MemoryMark, Span
from plait.values import JsonObject, JsonValue


class Timeline:
    """Spans, communication events and memory marks, in the order in which they ended."""

    def __init__(
        self, rank: int = 0, *, enabled: bool = True, origin_seconds: float | None = None
    ) -> None:
        self.rank = rank
        self.enabled = enabled
        self.origin_seconds = time.perf_counter() if origin_seconds is None else origin_seconds
        self.spans: list[Span] = []
        self.comms: list[CommEvent] = []
        self.marks: list[MemoryMark] = []

    def now(self) -> float:
        """Seconds since the origin."""
        return time.perf_counter() - self.origin_seconds

    @contextmanager
    def span(self, name: str, kind: str, **args: object) -> Iterator[None]:
        """Record the block as a span; an exception passes through and the span is recorded too."""
        if not self.enabled:
            yield
            return
        start = self.now()
        try:
            yield
        finally:
            self.spans.append(Span(name, kind, self.rank, start, self.now() - start, args))

    def add(self, record: Span | CommEvent | MemoryMark) -> None:
        """Append one finished record; nothing when disabled."""
        if not self.enabled:
            return
        if isinstance(record, Span):
            self.spans.append(record)
        elif isinstance(record, CommEvent):
            self.comms.append(record)
        else:
            self.marks.append(record)

    def mark_memory(self, bytes_by_kind: Mapping[str, int]) -> None:
        """Record the memory in use now, in bytes by kind."""
        if self.enabled:
            self.marks.append(MemoryMark(self.rank, self.now(), dict(bytes_by_kind)))

    def clear(self) -> None:
        """Forget the records; the origin stays."""
        self.spans = []
        self.comms = []
        self.marks = []

    @property
    def seconds(self) -> float:
        """From the first start to the last end of spans and communications; 0 when there is
        none.
        """
        records: list[Span | CommEvent] = [*self.spans, *self.comms]
        if not records:
            return 0.0
        return max(r.stop_seconds for r in records) - min(r.start_seconds for r in records)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that appear, ascending."""
        records: list[Span | CommEvent | MemoryMark] = [*self.spans, *self.comms, *self.marks]
        return tuple(sorted({record.rank for record in records}))

    def window(self, rank: int) -> tuple[float, float]:
        """Seconds of the first start and the last stop of a rank's spans, of which there are
        some.
        """
        spans = [span for span in self.spans if span.rank == rank]
        return min(s.start_seconds for s in spans), max(s.stop_seconds for s in spans)

    def busy_seconds(self, rank: int, kinds: Iterable[str] | None = None) -> float:
        """The time that `rank` spent in spans (of these kinds), overlaps counted once."""
        wanted = None if kinds is None else set(kinds)
        chosen = [s for s in self.spans if s.rank == rank and (wanted is None or s.kind in wanted)]
        total = 0.0
        end = float("-inf")
        for span in sorted(chosen, key=lambda s: s.start_seconds):
            total += max(0.0, span.stop_seconds - max(end, span.start_seconds))
            end = max(end, span.stop_seconds)
        return total

    @staticmethod
    def merge(timelines: Iterable[Timeline]) -> Timeline:
        """One timeline of all ranks, on the earliest origin; right for ranks of one host, whose
        clock is one.
        """
        parts = list(timelines)
        origin = min((t.origin_seconds for t in parts), default=0.0)
        merged = Timeline(origin_seconds=origin)
        for part in parts:
            later = part.origin_seconds - origin
            merged.spans += [
                Span(s.name, s.kind, s.rank, s.start_seconds + later, s.seconds, s.args)
                for s in part.spans
            ]
            merged.comms += [
                CommEvent(
                    c.axis,
                    c.op,
                    c.bytes,
                    c.start_seconds + later,
                    c.seconds,
                    c.rank,
                    c.exposed_seconds,
                )
                for c in part.comms
            ]
            merged.marks += [
                MemoryMark(m.rank, m.at_seconds + later, m.bytes_by_kind) for m in part.marks
            ]
        return merged

    def labelled(self, **args: object) -> Timeline:
        """A timeline of these records, every span with the given arguments beside its own."""
        other = Timeline(self.rank, origin_seconds=self.origin_seconds)
        other.spans = [replace(span, args={**span.args, **args}) for span in self.spans]
        other.comms, other.marks = list(self.comms), list(self.marks)
        return other

    def by_label(self, name: str) -> dict[JsonValue, Timeline]:
        """A timeline for each value of a span argument, in order. A communication goes with the
        span in which it ended.

        Spans without it are left out, and so are communications outside all spans.
        """
        timelines: dict[JsonValue, Timeline] = {}
        for span in sorted(self.spans, key=lambda span: span.start_seconds):
            if name in span.args:
                part = timelines.setdefault(
                    span.args[name], Timeline(self.rank, origin_seconds=self.origin_seconds)
                )
                part.spans.append(span)
        windows = [
            (rank, *part.window(rank), part) for part in timelines.values() for rank in part.ranks
        ]
        for comm in self.comms:
            home = next(
                (
                    p
                    for rank, start, stop, p in windows
                    if rank == comm.rank and start <= comm.stop_seconds <= stop
                ),
                None,
            )
            if home is not None:
                home.comms.append(comm)
        return timelines

    @classmethod
    def from_chrome(cls, trace: Mapping[str, object]) -> Timeline:
        """The timeline of a trace that `to_chrome` made. Raises KeyError or ValueError for
        another.
        """
        timeline = cls(origin_seconds=0.0)
        timeline.spans, timeline.comms, timeline.marks = from_chrome(trace)
        return timeline

    def to_chrome(self) -> JsonObject:
        """The trace as an object for Perfetto and chrome://tracing; `json.dumps` it."""
        return to_chrome(self.spans, self.comms, self.marks)
