"""The page of `plait compare`: one self-contained HTML file of a table, bars and a timeline a plan,
on one time scale.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.trace import Timeline
from plait.trace.page import Grid, PageSection, Picture, page
from plait.trace.picture import Bar, Frame, bars, lanes, timeline_lanes
from plait.values import JsonObject

HEAD = ("plan", "loss", "error", "ms/step", "tokens/s", "bubble", "peak MB", "MB sent by axis")
STEP_TEXT = (
    "The mean over ranks and the last steps: computing, standing still for messages of an axis, "
    "and the rest."
)
MEMORY_TEXT = "The state of the fullest rank between steps."


def cells(row: JsonObject) -> tuple[str, ...]:
    """One row of the table, as the terminal and the page show it."""
    return (
        row["plan"],
        "-" if row["final_loss"] is None else f"{row['final_loss']:.4f}",
        "-" if row["loss_error"] is None else f"{row['loss_error']:.1e}",
        f"{(row['step_seconds_median'] or 0) * 1e3:,.1f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['bubble_fraction']:.1%}",
        f"{max(row['peak_memory']) / 1e6:,.0f}",
        ", ".join(f"{axis} {sent / 1e6:,.1f}" for axis, sent in row["traffic"].items()) or "-",
    )


def html(title: str, rows: Sequence[JsonObject], timelines: Sequence[Timeline]) -> str:
    """The whole page; everything on it was measured in the runs of the rows."""
    seconds = [Bar(row["plan"], _parts(row["breakdown"])) for row in rows]
    traffic = [_bar(row, "traffic", 1e6) for row in rows]
    memory = [_memory(row) for row in rows]
    sections = [
        PageSection("Side by side", (Grid(HEAD, tuple(cells(row) for row in rows)),)),
        PageSection("Where a step goes", (STEP_TEXT, Picture(bars(seconds, "ms")))),
        PageSection("Traffic", ("Sent in a step, by axis.", Picture(bars(traffic, "MB")))),
        PageSection("Memory", (MEMORY_TEXT, Picture(bars(memory, "MB")))),
        PageSection("Timelines", tuple(_pictures(rows, timelines))),
    ]
    return page(title, sections)


def _parts(breakdown: JsonObject) -> tuple[tuple[str, float], ...]:
    waiting = [
        (f"waiting for {axis}", seconds * 1e3)
        for axis, seconds in sorted(breakdown["waiting_seconds"].items())
    ]
    return (
        ("computing", breakdown["compute_seconds"] * 1e3),
        *(part for part in waiting if part[1] > 0),
        ("other", breakdown["other_seconds"] * 1e3),
    )


def _bar(row: JsonObject, key: str, unit: float) -> Bar:
    return Bar(row["plan"], tuple((name, value / unit) for name, value in row[key].items()))


def _memory(row: JsonObject) -> Bar:
    fullest = max(row["state_memory"], key=lambda kinds: sum(kinds.values()))
    return Bar(row["plan"], tuple((kind, value / 1e6) for kind, value in fullest.items()))


def _pictures(rows: Sequence[JsonObject], timelines: Sequence[Timeline]) -> list[str | Picture]:
    """One time scale for all, so that lengths can be compared by eye."""
    pictures = [
        (row["plan"], timeline)
        for row, timeline in zip(rows, timelines, strict=True)
        if timeline.spans
    ]
    if not pictures:
        return ["No step was traced."]
    longest = max(timeline.seconds for _, timeline in pictures) * 1e3
    return [
        Picture(
            lanes(timeline_lanes(timeline), Frame(length=longest, unit="ms", row_height=20)), plan
        )
        for plan, timeline in pictures
    ]
