"""One HTML page of headings, sentences, tables and SVG pictures, whole in one file: it opens
without a network.

Everything that comes in is escaped but for the pictures, which are our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

_STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem}
h1{font-size:1.4rem} h2{font-size:1.1rem;margin-top:2rem} h3{font-size:.95rem;margin:1rem 0 .2rem}
.picture{overflow-x:auto} table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.15rem .8rem .15rem 0;text-align:right} th:first-child,td:first-child{text-align:left}
th{border-bottom:1px solid #8888} .note{opacity:.75}
"""


@dataclass(frozen=True)
class Grid:
    """A table: its head and its rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """An `<svg>` from `trace.picture` or a chart of our own, with a line above it."""

    svg: str
    caption: str = ""


@dataclass(frozen=True)
class PageSection:
    """A heading and what stands under it: sentences (str), tables and pictures, in order."""

    title: str
    parts: Sequence[str | Grid | Picture] = field(default_factory=tuple)


def page(title: str, sections: Sequence[PageSection], policy: str = "") -> str:
    """The whole file; `policy` is its Content-Security-Policy, where it has one."""
    body = "\n".join(_section(section) for section in sections)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    if policy:
        head = f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">{head}'
    return (
        "<!DOCTYPE html>\n<html "
        f'lang="en"><head>{head}</head>\n<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n'
    )


def _section(section: PageSection) -> str:
    return "\n".join(
        [f"<h2>{escape(section.title)}</h2>", *(_part(part) for part in section.parts)]
    )


def _part(part: str | Grid | Picture) -> str:
    if isinstance(part, Grid):
        head = "".join(f"<th>{escape(word)}</th>" for word in part.head)
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in row)}</tr>\n" for row in part.rows
        )
        return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"
    if isinstance(part, Picture):
        caption = f"<h3>{escape(part.caption)}</h3>" if part.caption else ""
        return f'{caption}<div class="picture">{part.svg}</div>'
    return f'<p class="note">{escape(part)}</p>'
