"""Curves as SVG text: one number over another, on an axis of equal ratios, one line a series."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from plait.trace.picture import PALETTE, nice_step

_WIDTH = 640
_HEIGHT = 300
_LEFT = 70
_RIGHT = 24
_TOP = 24
_BOTTOM = 40
_LINES = 5
_STYLE = (
    "<style>text{font:11px sans-serif;fill:currentColor}"
    "line{stroke:currentColor;stroke-opacity:0.2}</style>"
)


@dataclass(frozen=True)
class Curve:
    """A named line through (x, y) points; each `hint` shows under the pointer."""

    name: str
    points: tuple[tuple[float, float], ...]
    hints: tuple[str, ...] = ()


def curves(series: Sequence[Curve], across: str, up: str) -> str:
    """One self-contained `<svg>`. `across` and `up` name the axes; `up` begins at 0."""
    xs = sorted({x for one in series for x, _ in one.points})
    most = max((y for one in series for _, y in one.points), default=0.0) or 1.0
    step = nice_step(most / _LINES)
    top = step * math.ceil(most / step * (1 - 1e-9))
    names = max((len(one.name) for one in series), default=0)
    width = _WIDTH + (7 * names if len(series) > 1 else 0)
    parts = [*_axes(xs, top, step), *_names(across, up)]
    for index, one in enumerate(series):
        parts += _line(one, xs, top, PALETTE[index % len(PALETTE)])
        if len(series) > 1:
            colour = PALETTE[index % len(PALETTE)]
            y = _TOP + 12 + 16 * index
            parts.append(
                f'<text x="{_WIDTH}" y="{y}" style="fill:{colour}">{escape(one.name)}</text>'
            )
    size = f'width="{width}" height="{_HEIGHT}" viewBox="0 0 {width} {_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{_STYLE}{"".join(parts)}</svg>\n'


def _across(x: float, xs: Sequence[float]) -> float:
    if xs[0] == xs[-1]:
        return (_LEFT + _WIDTH - _RIGHT) / 2
    part = math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
    return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)


def _up(y: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)


def _axes(xs: Sequence[float], top: float, step: float) -> Iterator[str]:
    for x in xs:
        yield _text(_across(x, xs), _HEIGHT - _BOTTOM + 16, f"{x:g}", "middle")
    for index in range(round(top / step) + 1):
        y = _up(index * step, top)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 6, y + 4, f"{index * step:,.6g}", "end")


def _names(across: str, up: str) -> Iterator[str]:
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, across, "middle")
    yield _text(6, 14, up, "start")


def _line(one: Curve, xs: Sequence[float], top: float, colour: str) -> Iterator[str]:
    places = [(_across(x, xs), _up(y, top)) for x, y in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    hints = one.hints or ("",) * len(places)
    for (x, y), hint in zip(places, hints, strict=True):
        title = f"<title>{escape(hint)}</title>" if hint else ""
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">{title}</circle>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
