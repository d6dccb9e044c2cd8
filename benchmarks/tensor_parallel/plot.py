"""Small multiples as SVG text: lines over a width, both axes logarithmic, one legend a panel. No
library is needed for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = {"1d": "#4c78a8", "1d,sp": "#72b7b2", "2d": "#f58518", "2.5d": "#54a24b", "3d": "#e45756"}
WIDTH = 300
HEIGHT = 190
LEFT = 46
TOP = 24
BOTTOM = 24


@dataclass(frozen=True)
class Panel:
    """A title, and points (x, y) by the name of a line."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def small_multiples(panels: Sequence[Panel], columns: int) -> str:
    """One self-contained `<svg>`."""
    rows = -(-len(panels) // columns)
    size = (columns * WIDTH, rows * HEIGHT)
    style = "<style>text{font:10px sans-serif;fill:#444}.t{font-weight:bold}</style>"
    parts = []
    for index, panel in enumerate(panels):
        x, y = index % columns * WIDTH, index // columns * HEIGHT
        parts.append(f'<g transform="translate({x},{y})">{_panel(panel)}</g>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" viewBox="0 '
        f'0 {size[0]} {size[1]}">'
    )
    return (
        "\n".join([head, style, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"])
        + "\n"
    )


def _panel(panel: Panel) -> str:
    points = [point for line in panel.lines.values() for point in line]
    xs = sorted({x for x, _ in points})
    ys = [y for _, y in points]
    low = math.floor(math.log10(min(ys)))
    high = math.ceil(math.log10(max(ys)))
    across = WIDTH - LEFT - 12
    up = HEIGHT - TOP - BOTTOM
    span = math.log(xs[-1] / xs[0]) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + math.log(x / xs[0]) / span * across, TOP + (high - math.log10(y)) / (
            high - low
        ) * up

    parts = [f'<text class="t" x="{LEFT}" y="14">{escape(panel.title)}</text>']
    for power in range(low, high + 1):
        _, y = place(xs[0], 10.0**power)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}h{across}" stroke="#ddd"/><text x="2" '
            f'y="{y + 3:.1f}">1e{power}</text>'
        )
    for x in xs:
        at, _ = place(x, 10.0**low)
        parts.append(f'<text x="{at - 8:.1f}" y="{HEIGHT - 8}">{x:g}</text>')
    for index, (name, line) in enumerate(panel.lines.items()):
        colour = _colour(name)
        path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(
            f'<text x="{LEFT + 6}" y="{TOP + 10 + 11 * index}" '
            f'style="fill:{colour}">{escape(name)}</text>'
        )
    return "".join(parts)


def _colour(plan: str) -> str:
    mode = plan.partition(":")[2] or "1d"
    return COLOURS.get(mode, COLOURS[mode.split(",")[0]])
