"""The layout of answers in a terminal: running text wrapped between words, and tables of plans.

A plan's text is never broken, since it is read and pasted as a whole. Where a table is too wide for
the terminal, each plan has a line of its own above its numbers.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions
    from rich.text import Text

GAP = "  "
_TERM = r"(?:(?:dp|tp|pp|ep|cp|mb)\d+|remat|precision|compile)(?::[\w.,-]+)?"
_PLAN = re.compile(rf"(?<!\S){_TERM}(?: {_TERM})+(?!\w)")
_LABEL = re.compile(r"\s*\S(?:\S| (?! ))*\s{2,}|\s*")
_JOINT = "\x00"
"""Stands for a blank inside a plan while lines are broken at blanks."""


def wrapped(text: str, width: int) -> str:
    """Each line broken between words, what follows standing below what follows the line's label.

    >>> print(wrapped("note   the plan dp2 tp2 is one word", 24))
    note   the plan dp2 tp2
           is one word
    """
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    label = _LABEL.match(line)
    indent = 0 if label is None else label.end()
    joined = _PLAN.sub(lambda found: found[0].replace(" ", _JOINT), line[indent:])
    words = joined.split(" ")
    room = width - max(map(len, words))
    hang = max(0, min(indent, room))  # a long plan stands further to the left than its label's text
    lines = []
    start = line[:indent]
    if indent + len(words[0]) > width:
        lines.append(start.rstrip())
        start = " " * hang
    lines += textwrap.wrap(
        joined,
        width,
        initial_indent=start,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_JOINT, " ")


@dataclass(frozen=True)
class Prose:
    """Running text, wrapped between words on a terminal and whole in a file."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        text = wrapped(self.text, options.max_width) if console.is_terminal else self.text
        yield Text(text, no_wrap=True, overflow="ignore")


@dataclass(frozen=True)
class PlanTable:
    """A table whose first column is a plan: as wide as the terminal, or as it needs in a file.

    Attributes:
        head: the names of the columns.
        rows: one plan each, with its numbers.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        head, body = self.lines(options.max_width if console.is_terminal else sys.maxsize)
        text = Text(no_wrap=True, overflow="ignore")
        text.append("\n".join(head), style="bold")
        for line in body:
            text.append(f"\n{line}")
        yield text

    def lines(self, width: int) -> tuple[list[str], list[str]]:
        """The lines of the head and of the rows, in columns of `width` characters."""
        table = (self.head, *self.rows)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        if sum(widths) + len(GAP) * (len(widths) - 1) <= width:
            rows = [[_line(row, widths, range(1, len(widths)), row[0])] for row in table]
        else:
            bands = _bands(widths, width)
            rows = [[row[0], *(_line(row, widths, band) for band in bands)] for row in table]
        return rows[0], [line for row in rows[1:] for line in row]


def _bands(widths: Sequence[int], width: int) -> list[list[int]]:
    """The columns behind the plan, as many on a line as there is room for."""
    bands: list[list[int]] = [[]]
    used = 0
    for column in range(1, len(widths)):
        needed = len(GAP) + widths[column]
        if bands[-1] and used + needed > width:
            bands.append([])
            used = 0
        bands[-1].append(column)
        used += needed
    return bands


def _line(
    row: Sequence[str], widths: Sequence[int], columns: Sequence[int], plan: str | None = None
) -> str:
    """The cells of some columns at the right of their width, behind the plan or an indent."""
    cells = [f"{row[column]:>{widths[column]}}" for column in columns]
    first = "" if plan is None else f"{plan:<{widths[0]}}"
    return (first + GAP + GAP.join(cells)).rstrip()
