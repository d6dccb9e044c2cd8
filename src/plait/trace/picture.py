"""Pictures as SVG text: lanes of boxes along time (schedules, timelines).

Pictures are plain strings. They need no library, no network and no script, and fit into a file, a
page or a test. All pictures of time share `lanes`, so that what was promised and what was measured
are drawn alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from plait.trace.records import CommEvent, Span
from plait.trace.timeline import Timeline

COLOURS: Mapping[str, str] = {
    "F": "#4c78a8",
    "B": "#f58518",
    "I": "#e4a11b",
    "W": "#54a24b",
    "REDUCE": "#b279a2",
    "U": "#e45756",
    "UNSHARD": "#9d755d",
    "wait": "#d3354a",
    "other": "#8a8f98",
}
"""Colours of actions by their kind; `wait` is time in which a rank waited for a message."""
PALETTE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#7a5cc7",
    "#8a8f98",
)
"""Colours that colour-blind readers can tell apart (after Okabe and Ito)."""
_CHARACTER = 6.3  # width of a character at 11 px
_TOP = 6
_GAP = 4
_AXIS = 22
_STYLE = (
    "<style>text{font:11px sans-serif;fill:currentColor}"
    ".in{fill:#111;text-anchor:middle}.tick{text-anchor:middle}</style>"
)


@dataclass(frozen=True)
class TimeBox:
    """Something that lasts from `start` on for `length`, in the picture's unit.

    `hint` shows under the pointer; `edge` draws a dark mark at its end; `slim` draws a line at the
    foot of the lane.
    """

    start: float
    length: float
    colour: str = COLOURS["other"]
    label: str = ""
    hint: str = ""
    opacity: float = 1.0
    edge: bool = False
    slim: bool = False


@dataclass(frozen=True)
class Lane:
    """A named row of boxes."""

    name: str
    boxes: tuple[TimeBox, ...]


@dataclass(frozen=True)
class Frame:
    """How lanes are laid out: `width` pixels stand for `length` of the unit (None: the end of the
    last box).

    Pictures of one `length` can be compared by eye. With a `unit` a time axis is drawn.
    """

    width: float = 1000.0
    length: float | None = None
    row_height: int = 28
    unit: str | None = None
    title: str = ""


def lanes(rows: Sequence[Lane], frame: Frame | None = None) -> str:
    """One self-contained `<svg>`: lanes down, time across."""
    frame = frame or Frame()
    end = (
        frame.length
        or max((box.start + box.length for row in rows for box in row.boxes), default=1.0)
        or 1.0
    )
    margin = 16 + _CHARACTER * max((len(row.name) for row in rows), default=0)
    scale = frame.width / end
    pitch = frame.row_height + _GAP
    parts: list[str] = []
    for index, row in enumerate(rows):
        top = _TOP + index * pitch
        parts.append(_text(4, top + frame.row_height * 0.65, row.name))
        for box in row.boxes:
            parts += _box(
                box,
                margin + box.start * scale,
                top,
                max(box.length * scale - 1, 0.4),
                frame.row_height,
            )
    bottom = _TOP + len(rows) * pitch
    if frame.unit is not None:
        parts += _axis(end, frame.unit, margin, scale, bottom)
    height = bottom + (_AXIS if frame.unit is not None else 6)
    return _svg(margin + frame.width + 24, height, frame.title, parts)


def _box(box: TimeBox, x: float, top: float, width: float, height: float) -> Iterator[str]:
    if box.slim:
        top = top + height - 4
        height = 4
    opacity = "" if box.opacity >= 1 else f' fill-opacity="{box.opacity:.2f}"'
    hint = f"<title>{escape(box.hint)}</title>" if box.hint else ""
    yield (
        f'<rect x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{height:g}" '
        f'fill="{box.colour}"{opacity}>{hint}</rect>'
    )
    if box.label and not box.slim and len(box.label) * _CHARACTER <= width:
        yield _text(x + width / 2, top + height * 0.65, box.label, "in")
    if box.edge:
        yield (
            f'<rect x="{x + width - 2:.2f}" y="{top:g}" width="3" height="{height:g}" '
            'fill="#b00020"/>'
        )


def _axis(end: float, unit: str, margin: float, scale: float, y: float) -> Iterator[str]:
    step = nice_step(end / 8)
    yield (
        f'<rect x="{margin:.2f}" y="{y:g}" width="{end * scale:.2f}" height="1" '
        'fill="currentColor" fill-opacity="0.4"/>'
    )
    for index in range(int(end / step + 1e-9) + 1):
        x = margin + index * step * scale
        yield (
            f'<rect x="{x:.2f}" y="{y:g}" width="1" height="4" fill="currentColor" '
            'fill-opacity="0.4"/>'
        )
        yield _text(x, y + 16, f"{index * step:g}{'' if index else f' {unit}'}", "tick")


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def timeline_lanes(timeline: Timeline, per_second: float = 1e3) -> list[Lane]:
    """A lane a rank, by default in milliseconds from the first start on. Waits for messages are
    slim boxes at its foot.
    """
    records: list[Span | CommEvent] = [*timeline.spans, *timeline.comms]
    origin = min((record.start_seconds for record in records), default=0.0)
    lanes = []
    for rank in timeline.ranks:
        spans = [span for span in timeline.spans if span.rank == rank and span.seconds > 0]
        waits = [comm for comm in timeline.comms if comm.rank == rank and comm.exposed_seconds > 0]
        boxes = [_of_span(span, origin, per_second) for span in spans] + [
            _of_wait(wait, origin, per_second) for wait in waits
        ]
        lanes.append(Lane(f"rank {rank}", tuple(boxes)))
    return lanes


def _of_span(span: Span, origin: float, per_second: float) -> TimeBox:
    start = (span.start_seconds - origin) * per_second
    length = span.seconds * per_second
    colour = COLOURS.get(span.kind, COLOURS["other"])
    return TimeBox(
        start,
        length,
        colour,
        span.name,
        f"{span.name}: {span.seconds * 1e3:.3f} ms from {start:.3f} on",
    )


def _of_wait(comm: CommEvent, origin: float, per_second: float) -> TimeBox:
    start = (comm.stop_seconds - comm.exposed_seconds - origin) * per_second
    hint = (
        f"waited {comm.exposed_seconds * 1e3:.3f} ms for {comm.op} on {comm.axis}, {comm.bytes} "
        "bytes"
    )
    return TimeBox(start, comm.exposed_seconds * per_second, COLOURS["wait"], "", hint, slim=True)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names and colours in one row, as an `<svg>`."""
    entries = list(entries)
    width = sum(26 + _CHARACTER * len(name) for name, _ in entries)
    return _svg(width + 8, 20, "", list(_legend(entries, 4, 2)))


def _legend(entries: Iterable[tuple[str, str]], x: float, y: float) -> Iterator[str]:
    for name, colour in entries:
        yield f'<rect x="{x:.1f}" y="{y:g}" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 16, y + 10, name)
        x += 26 + _CHARACTER * len(name)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{of_kind}>{escape(text)}</text>'


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    named = f"<title>{escape(title)}</title>" if title else ""
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{named}{_STYLE}{"".join(parts)}</svg>\n'
