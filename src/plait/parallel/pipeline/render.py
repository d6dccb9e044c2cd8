"""A schedule as a picture: plain text for errors, commits and tests, a coloured grid, SVG for a
page.

All draw the same cells, ranks down and time across. With equal times of F, I and W a cell is one
unit wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.parallel.pipeline.actions import COMPUTE, Action, Kind, Schedule
from plait.parallel.pipeline.clock import unit, walk
from plait.trace.picture import COLOURS, Frame, Lane, TimeBox, lanes

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(frozen=True)
class Cell:
    """An action from slot `start` on, `width` slots wide; `updated`: the weights of its stage
    change right after it.
    """

    action: Action
    index: int
    start: int
    width: int
    updated: bool = False

    @property
    def text(self) -> str:
        """The action, and `U` after it when an update follows."""
        return f"{self.action}{'U' if self.updated else ''}"


def rows(schedule: Schedule, seconds: Callable[[Action], float] = unit) -> list[list[Cell]]:
    """The cells of every rank; what a broken schedule never reaches stands behind what it does."""
    drawn: list[list[Cell]] = [[] for _ in schedule.ranks]
    walked = walk(schedule, seconds)
    for event in walked.events:
        if event.end > event.start:
            actions = schedule.ranks[event.rank]
            cell = Cell(
                event.action, event.index, round(event.start), round(event.end - event.start)
            )
            drawn[event.rank].append(
                Cell(*_fields(cell), _updated(actions, event.index))
                if event.action.kind in COMPUTE
                else cell
            )
    for rank, stopped in enumerate(walked.stopped):
        for index in range(stopped, len(schedule.ranks[rank])):
            action = schedule.ranks[rank][index]
            end = drawn[rank][-1].start + drawn[rank][-1].width if drawn[rank] else 0
            if seconds(action) > 0:
                drawn[rank].append(Cell(action, index, end, round(seconds(action))))
    return drawn


def _fields(cell: Cell) -> tuple[Action, int, int, int]:
    return cell.action, cell.index, cell.start, cell.width


def _updated(actions: tuple[Action, ...], index: int) -> bool:
    """Whether the stage of a computing action is updated before anything else is computed on its
    rank.
    """
    for action in actions[index + 1 :]:
        if action.kind in COMPUTE:
            return False
        if action.kind is Kind.UPDATE and action.stage == actions[index].stage:
            return True
    return False


def grid(schedule: Schedule, mark: tuple[int, int] | None = None) -> str:
    """Ranks down, time across. `mark` is a (rank, position in its list). With it every action is
    drawn, one slot each, and the marked one stands between > and <.
    """
    drawn = rows(schedule, unit if mark is None else lambda action: 1.0)
    width = max((len(cell.text) for row in drawn for cell in row), default=1) + (2 if mark else 0)
    lines = []
    for rank, row in enumerate(drawn):
        slots: list[str] = ["."] * max((cell.start + cell.width for cell in row), default=0)
        for cell in row:
            slots[cell.start] = f">{cell.text}<" if mark == (rank, cell.index) else cell.text
            slots[cell.start + 1 : cell.start + cell.width] = ["-"] * (cell.width - 1)
        lines.append(f"{rank:>3} | " + " ".join(f"{slot:<{width}}" for slot in slots).rstrip())
    return "\n".join(lines)


def coloured(schedule: Schedule, columns: int = 10**6) -> Text:
    """The grid as rich text: blue forward, orange backward, yellow input gradient, green weight
    gradient; `U`: updated after.

    At most `columns` wide: what is longer goes on below. With one stage a rank the cells leave the
    stage out.
    """
    from rich.text import Text

    drawn = rows(schedule)
    short = schedule.num_stages == schedule.num_ranks
    words = {
        cell: cell.text[len(str(cell.action.stage)) :] if short else cell.text
        for row in drawn
        for cell in row
    }
    width = max(map(len, words.values()), default=1) + 1
    num_slots = max((cell.start + cell.width for cell in words), default=0)
    band = max(1, (columns - 4) // width)
    in_slots = [_slots_of(row) for row in drawn]
    text = Text(no_wrap=True, overflow="ignore")
    for start in range(0, num_slots, band):
        text.append("\n\n" if start else "")
        for rank, slots in enumerate(in_slots):
            text.append(f"{rank:>3} ", style="bold")
            for slot in range(start, min(start + band, num_slots)):
                cell, offset = slots.get(slot, (None, 0))
                if cell is None:
                    text.append(" " * width)
                    continue
                last = offset + 1 == cell.width
                piece = f"{words[cell] if offset == 0 else '':<{width - last}}"
                colour = COLOURS.get(cell.action.kind.value, COLOURS["other"])
                text.append(piece, style=f"{'bold ' if cell.updated else ''}#000000 on {colour}")
                text.append(" " if last else "")
            text.append("\n" if rank + 1 < len(drawn) else "")
    return text


def _slots_of(row: Sequence[Cell]) -> dict[int, tuple[Cell, int]]:
    """By slot of a rank's line, the cell that fills it and which of the cell's slots it is."""
    return {cell.start + offset: (cell, offset) for cell in row for offset in range(cell.width)}


def svg(schedule: Schedule, unit_width: int = 34, row_height: int = 28) -> str:
    """The grid as one self-contained SVG; deeper stages of a rank are drawn paler, updates as a
    dark edge.
    """
    drawn = rows(schedule)
    end = max((cell.start + cell.width for row in drawn for cell in row), default=1)
    title = (
        f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_micro_batches} micro-batches"
    )
    frame = Frame(width=end * unit_width, length=end, row_height=row_height, title=title)
    return lanes([_lane(schedule, rank, row) for rank, row in enumerate(drawn)], frame)


def _lane(schedule: Schedule, rank: int, row: list[Cell]) -> Lane:
    stages = schedule.stages(rank)

    def box(cell: Cell) -> TimeBox:
        pale = 1 - 0.55 * stages.index(cell.action.stage) / len(stages)
        colour = COLOURS.get(cell.action.kind.value, COLOURS["other"])
        return TimeBox(
            cell.start, cell.width, colour, str(cell.action), opacity=pale, edge=cell.updated
        )

    return Lane(f"rank {rank}", tuple(box(cell) for cell in row))
