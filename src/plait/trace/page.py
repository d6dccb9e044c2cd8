"""One HTML page of headings, sentences, tables and SVG pictures, whole in one file: it opens
without a network.

Everything that comes in is escaped but for the pictures, which are our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

from plait.trace.bars import BAR_STYLE, Bars

_VIEW = '<meta name="viewport" content="width=device-width, initial-scale=1">'
_STYLE = """
:root{color-scheme:light dark;--paper:#fbfbfa;--panel:#fff;--ink:#1c1e21;--faint:#62676e;
--line:#d9dce0;--accent:#0a66c2;--grid:#e8eaec}
@media (prefers-color-scheme:dark){:root{--paper:#14171a;--panel:#1c2024;--ink:#e6e8ea;
--faint:#a2a9b1;--line:#363c43;--accent:#6cb2ff;--grid:#2a2f35}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1200px;padding:1.2rem;
background:var(--paper);color:var(--ink);overflow-wrap:anywhere}
h1{font-size:1.25rem;margin:0 0 .2rem} h2{font-size:1rem;margin:0 0 .6rem}
h3{font-size:.85rem;font-weight:500;color:var(--faint);margin:.8rem 0 .2rem}
section{border:1px solid var(--line);border-radius:10px;background:var(--panel);
padding:.8rem 1rem 1rem;margin:0 0 1rem}
.lead{font-size:1.05rem;margin:0 0 1rem}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:.6rem;
margin:0 0 1rem}
.card{border:1px solid var(--line);border-radius:8px;padding:.45rem .7rem;background:var(--panel)}
.card b{display:block;font-size:1.12rem;font-variant-numeric:tabular-nums}
.card span,.card small{color:var(--faint);font-size:.8rem;display:block}
.picture,.table{overflow-x:auto}
section>:last-child{margin-bottom:0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.25rem .9rem .25rem 0;text-align:right;white-space:nowrap}
th:first-child,td:first-child,.words{text-align:left}
td.words{white-space:normal;min-width:9rem;max-width:46rem}
td{vertical-align:top}
th{border-bottom:1px solid var(--line);color:var(--faint);font-weight:500}
@media (max-width:520px){th{white-space:normal;overflow-wrap:normal;vertical-align:bottom}
th,td{padding-right:.5rem}.words{min-width:6rem!important}
.wide thead{position:absolute;left:-999px}
.wide tr{display:grid;grid-template-columns:repeat(3,1fr);padding:.35rem 0;
border-bottom:1px solid var(--line)}
.wide td{text-align:left;white-space:normal}.wide td:first-child{grid-column:1/-1;font-weight:600}
.wide td:not(:first-child)::before{content:attr(data-name);display:block;color:var(--faint);
font-size:.76rem}}
summary{cursor:pointer;color:var(--faint);font-size:.9rem}
.note{font-size:.92rem;margin:.5rem 0}
"""


@dataclass(frozen=True)
class Card:
    """One number of a page: its name, its value, and what stands beside it in small letters."""

    name: str
    value: str
    beside: str = ""


@dataclass(frozen=True)
class Cards:
    """Numbers side by side."""

    cards: tuple[Card, ...]


@dataclass(frozen=True)
class Spot:
    """Where the page's script draws. Until it has, and without it, the parts stand there."""

    name: str
    parts: Sequence[str | Picture] = ()


@dataclass(frozen=True)
class Grid:
    """A table: its head and its rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sentences: tuple[str, ...] = ()
    """The columns, by their heads, that hold words: they begin at the left and may break."""
    wide: bool = False
    """Whether few columns, too, do not fit a narrow screen side by side."""


@dataclass(frozen=True)
class Picture:
    """An `<svg>` from `trace.picture` or a chart of our own, with a line above it."""

    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Folded:
    """A table that is shown when its line is clicked."""

    line: str
    grid: Grid


@dataclass(frozen=True)
class PageSection:
    """A heading and what stands under it: sentences (str), tables and pictures, in order."""

    title: str
    parts: Sequence[str | Grid | Picture | Cards | Spot | Folded | Bars] = field(
        default_factory=tuple
    )


@dataclass(frozen=True)
class Top:
    """The beginning of a page: the main thing in a sentence, and its numbers."""

    lead: str = ""
    cards: tuple[Card, ...] = ()


@dataclass(frozen=True)
class Drawing:
    """The script of a page as HTML of our own, and the page's Content-Security-Policy."""

    html: str = ""
    policy: str = ""


MOST_NARROW: Final = 4
"""Columns of a table that fit a screen of 400 pixels side by side."""
NO_TOP: Final = Top()
NO_DRAWING: Final = Drawing()


def page(
    title: str,
    sections: Sequence[PageSection],
    top: Top = NO_TOP,
    drawing: Drawing = NO_DRAWING,
) -> str:
    """The whole file."""
    begins = f'<p class="lead">{escape(top.lead)}</p>' if top.lead else ""
    begins += _part(Cards(top.cards)) if top.cards else ""
    body = "\n".join(_section(section) for section in sections)
    style = f"<style>{_STYLE}{BAR_STYLE}</style>"
    head = f'<meta charset="utf-8">{_VIEW}<title>{escape(title)}</title>{style}'
    if drawing.policy:
        policy = escape(drawing.policy)
        head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">{head}'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body><h1>{escape(title)}</h1>\n'
        f"{begins}\n{body}\n{drawing.html}</body></html>\n"
    )


def _section(section: PageSection) -> str:
    parts = "\n".join(_part(part) for part in section.parts)
    return f"<section><h2>{escape(section.title)}</h2>\n{parts}</section>"


def _table(grid: Grid) -> str:
    """A table. On a narrow screen a row of many columns is a block, each number below its name."""
    wide = grid.wide or len(grid.head) > MOST_NARROW
    kinds = [' class="words"' if name in grid.sentences else "" for name in grid.head]
    head = "".join(
        f"<th{kind}>{escape(name)}</th>" for name, kind in zip(grid.head, kinds, strict=True)
    )
    if wide:
        kinds = [
            f'{kind} data-name="{escape(name)}"'
            for name, kind in zip(grid.head, kinds, strict=True)
        ]
    rows = "".join(f"<tr>{_cells(row, kinds)}</tr>\n" for row in grid.rows)
    body = f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>"
    begins = '<table class="wide">' if wide else "<table>"
    return f'<div class="table">{begins}{body}</table></div>'


def _cells(row: Sequence[str], kinds: Sequence[str]) -> str:
    pairs = zip(row, kinds, strict=True)
    return "".join(f"<td{kind}>{escape(word)}</td>" for word, kind in pairs)


def _part(part: str | Grid | Picture | Cards | Spot | Folded | Bars) -> str:
    if isinstance(part, Bars):
        text = part.html()
    elif isinstance(part, Folded):
        text = f"<details><summary>{escape(part.line)}</summary>{_part(part.grid)}</details>"
    elif isinstance(part, Cards):
        text = f'<div class="cards">{"".join(map(_card, part.cards))}</div>'
    elif isinstance(part, Spot):
        inner = "\n".join(_part(one) for one in part.parts)
        text = f'<div id="{escape(part.name)}">{inner}</div>'
    elif isinstance(part, Grid):
        text = _table(part)
    elif isinstance(part, Picture):
        caption = f"<h3>{escape(part.caption)}</h3>" if part.caption else ""
        text = f'{caption}<div class="picture">{part.svg}</div>'
    else:
        text = f'<p class="note">{escape(part)}</p>'
    return text


def _card(card: Card) -> str:
    return (
        f'<div class="card"><span>{escape(card.name)}</span><b>{escape(card.value)}</b>'
        f"<small>{escape(card.beside)}</small></div>"
    )
