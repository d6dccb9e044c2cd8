"""A line plot as SVG text: series of (x, y), one colour each, with a legend. Plain strings, as
`plait.trace.picture`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from plait.trace.picture import PALETTE

WIDTH = 460
HEIGHT = 260
LEFT = 52
BOTTOM = 40
TOP = 30
LEGEND = 170
Series = Mapping[str, Sequence[tuple[float, float]]]


def lines(series: Series, title: str, x_name: str, y_name: str) -> str:
    """The plot of all series, axes from the smallest to the largest value."""
    points = [point for line in series.values() for point in line]
    x_low = min(x for x, _ in points)
    x_high = max(x for x, _ in points)
    y_low = min(y for _, y in points)
    y_high = max(y for _, y in points)

    def at(x: float, y: float) -> tuple[float, float]:
        right = (x - x_low) / ((x_high - x_low) or 1) * (WIDTH - LEFT - 10)
        up = (y - y_low) / ((y_high - y_low) or 1) * (HEIGHT - BOTTOM - TOP)
        return LEFT + right, HEIGHT - BOTTOM - up

    drawn = [f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = y_low + share * (y_high - y_low)
        _, y = at(x_low, value)
        drawn.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        x, _ = at(x_low + share * (x_high - x_low), y_low)
        label = f"{x_low + share * (x_high - x_low):.4g}"
        drawn.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>'
        )
    drawn.append(
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" '
        f'text-anchor="middle">{escape(x_name)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    drawn.append(
        f'<text transform="translate(12 {middle}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_name)}</text>'
    )
    for index, (name, line) in enumerate(series.items()):
        colour = PALETTE[index % len(PALETTE)]
        y = TOP + 16 * index
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
        drawn.append(
            f'<line x1="{WIDTH}" x2="{WIDTH + 16}" y1="{y}" y2="{y}" stroke="{colour}" '
            'stroke-width="3"/>'
        )
        drawn.append(f'<text x="{WIDTH + 22}" y="{y + 4}">{escape(name)}</text>')
    size = f'width="{WIDTH + LEGEND}" height="{HEIGHT}" viewBox="0 0 {WIDTH + LEGEND} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11"'
    body = "\n".join(drawn)
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{ground}\n{body}\n</svg>\n'
