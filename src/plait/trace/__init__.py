"""WORDS shared by promise and measurement: spans, collective events, memory marks, and the timeline
that holds them.
"""

from __future__ import annotations

from plait.trace.chrome import to_chrome
from plait.trace.records import CommEvent, MemoryMark, Span
from plait.trace.render import render
from plait.trace.timeline import Timeline

__all__ = ["CommEvent", "MemoryMark", "Span", "Timeline", "render", "to_chrome"]
