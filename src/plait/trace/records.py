"""The records. A simulator writes them as promise, a run writes them as measurement; nothing tells
them apart.

Times are seconds since the start of the timeline they stand in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.values import JsonMapping


@dataclass(frozen=True)
class Span:
    """Something a rank did for a while: an action of the schedule, an update, a wait."""

    name: str
    kind: str
    rank: int
    start_seconds: float
    seconds: float
    args: JsonMapping = field(default_factory=dict)

    @property
    def stop_seconds(self) -> float:
        """When it ended."""
        return self.start_seconds + self.seconds


@dataclass(frozen=True)
class CommEvent:
    """One communication on one axis: from its issue to the end of its wait, `exposed_seconds` of it
    spent waiting.
    """

    axis: str
    op: str
    bytes: int
    start_seconds: float
    seconds: float
    rank: int
    exposed_seconds: float = 0.0

    @property
    def stop_seconds(self) -> float:
        """When it was complete."""
        return self.start_seconds + self.seconds


@dataclass(frozen=True)
class MemoryMark:
    """Memory in use at one moment, by kind (parameters, gradients, optimizer, activations, buffers,
    process).
    """

    rank: int
    at_seconds: float
    bytes_by_kind: Mapping[str, int]
