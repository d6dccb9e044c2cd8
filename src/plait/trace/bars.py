"""Bars side by side as HTML. Each has a name, its parts on one scale, and a number.

Below 520 pixels a name stands above its bar, so that nothing is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from plait.trace.picture import PALETTE
from plait.trace.units import size_words

BAR_STYLE: Final = """
.bar{display:grid;grid-template-columns:minmax(6rem,15rem) minmax(0,1fr) 5.5rem;gap:.1rem .7rem;
align-items:center;font-size:.86rem;margin:.25rem 0}
.bar .track{display:flex;height:1.05rem;background:var(--grid);border-radius:3px;overflow:hidden}
.bar .track i{display:block;height:100%}
.bar b{font-weight:500;text-align:right;font-variant-numeric:tabular-nums}
.key{font-size:.82rem;color:var(--faint);margin:.5rem 0 0}
.key span{display:inline-block;margin-right:1rem}
.key i{display:inline-block;width:.65em;height:.65em;border-radius:50%;margin-right:.4em}
@media (max-width:520px){.bar{grid-template-columns:minmax(0,1fr) 5.5rem;margin:.5rem 0}
.bar .name{grid-column:1/-1}}
"""


@dataclass(frozen=True)
class Bar:
    """A named bar of one or several parts, (label, value) each."""

    name: str
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Bars:
    """Bars on one scale; `words` makes a value and its unit a text."""

    rows: Sequence[Bar]
    words: Callable[[float], str] = size_words

    def html(self) -> str:
        """The bars, and a legend where their parts differ."""
        labels = list(dict.fromkeys(label for row in self.rows for label, _ in row.parts))
        colours = {label: PALETTE[index % len(PALETTE)] for index, label in enumerate(labels)}
        most = max(map(_total, self.rows), default=0.0) or 1.0
        lines = [self._bar(row, most, colours) for row in self.rows]
        if len(labels) > 1:
            keys = "".join(
                f'<span><i style="background:{colours[label]}"></i>{escape(label)}</span>'
                for label in labels
            )
            lines.append(f'<p class="key">{keys}</p>')
        return f'<div class="bars">{"".join(lines)}</div>'

    def _bar(self, row: Bar, most: float, colours: dict[str, str]) -> str:
        parts = "".join(
            f'<i style="width:{100 * value / most:.3f}%;background:{colours[label]}" '
            f'title="{escape(f"{label}: {self.words(value)}")}"></i>'
            for label, value in row.parts
        )
        return (
            f'<div class="bar"><span class="name">{escape(row.name)}</span>'
            f'<span class="track">{parts}</span><b>{escape(self.words(_total(row)))}</b></div>'
        )


def _total(row: Bar) -> float:
    return sum(value for _, value in row.parts)
