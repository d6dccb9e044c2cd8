"""The page of `plait compare`: one self-contained HTML file of a table, bars and a timeline a plan,
on one time scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from plait.trace import Timeline
from plait.trace.bars import Bar, Bars
from plait.trace.drawn import drawn_timeline
from plait.trace.page import (
    NO_DRAWING,
    Card,
    Drawing,
    Grid,
    PageSection,
    Picture,
    Spot,
    Top,
    page,
)
from plait.trace.picture import Frame, lanes, timeline_lanes
from plait.trace.units import size_words, time_words
from plait.values import JsonMapping, JsonObject

STEP_TEXT = (
    "The mean over ranks and the last steps: computing, standing still for messages of an axis, "
    "and the rest."
)
MEMORY_TEXT = "The state of each rank between steps, by kind."
MOST_RANKS = 16
STATE = ("parameters", "gradients", "optimizer")


def head(rows: Sequence[JsonObject]) -> tuple[str, ...]:
    """The names of the columns of `cells`."""
    measured = ("plan", "loss", "error", "ms/step", f"{rows[0]['unit']}/s")
    return (*measured, "bubble", "peak MB", "MB sent by axis")


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


@dataclass(frozen=True)
class ComparedRun:
    """The run of one plan beside its row: its course, its prediction by keys, and advice."""

    course: Sequence[JsonMapping] = ()
    predicted: JsonMapping | None = None
    advice: Sequence[str] = ()


def html(
    title: str,
    rows: Sequence[JsonObject],
    timelines: Sequence[Timeline],
    runs: Sequence[ComparedRun] = (),
    drawing: Drawing = NO_DRAWING,
) -> str:
    """The whole page. `drawing` is the script of `pictures_of` the same runs."""
    runs = runs or [ComparedRun()] * len(rows)
    seconds = [Bar(row["plan"], _parts(row["breakdown"])) for row in rows]
    traffic = [bar for row, run in zip(rows, runs, strict=True) for bar in _traffic(row, run)]
    memory = [bar for row, run in zip(rows, runs, strict=True) for bar in _memory(row, run)]
    advice = [
        (row["plan"], " ".join(run.advice))
        for row, run in zip(rows, runs, strict=True)
        if run.advice
    ]
    sections = [
        PageSection("Side by side", (Grid(head(rows), tuple(cells(row) for row in rows)),)),
        *_predicted(rows, runs),
        *_advised(advice),
        *([PageSection("Course", (Spot("charts"),))] if any(run.course for run in runs) else []),
        PageSection("Timelines", (Spot("timelines", tuple(_pictures(rows, timelines))),)),
        PageSection("Where a step goes", (STEP_TEXT, Bars(seconds, time_words))),
        PageSection("Traffic", ("Sent in a step, by axis.", Bars(traffic))),
        PageSection("Memory", (MEMORY_TEXT, Bars(memory))),
    ]
    return page(title, sections, Top(lead(rows), _cards(rows, runs)), drawing)


def _advised(rows: Sequence[tuple[str, str]]) -> list[PageSection]:
    """A table of each plan and its advice; no section where nothing is known."""
    head = ("plan", "what limits it, and what to try next")
    grid = Grid(head, tuple(rows), sentences=head[1:])
    return [PageSection("What limits them, and what to try next", [grid])] if rows else []


def pictures_of(
    rows: Sequence[JsonObject], timelines: Sequence[Timeline], runs: Sequence[ComparedRun]
) -> JsonMapping:
    """The data of the page's curves and timelines."""
    return {
        "runs": [
            {"name": row["plan"], "steps": list(run.course), "predicted": run.predicted}
            for row, run in zip(rows, runs, strict=True)
        ],
        "timelines": [
            drawn_timeline(timeline, row["plan"])
            for row, timeline in zip(rows, timelines, strict=True)
            if timeline.spans
        ],
    }


def lead(rows: Sequence[JsonObject]) -> str:
    """The fastest plan in one sentence, by how much, and whether the losses agree."""
    fastest = max(rows, key=lambda row: row["tokens_per_second"])
    others = [row for row in rows if row is not fastest]
    text = f"Of {len(rows)} plans, {fastest['plan']} trained fastest"
    if not others:
        text = f"{fastest['plan']} trained"
    text += f", with {fastest['tokens_per_second']:,.0f} {fastest['unit']} a second"
    if others:
        second = max(others, key=lambda row: row["tokens_per_second"])
        if second["tokens_per_second"]:
            more = fastest["tokens_per_second"] / second["tokens_per_second"] - 1
            text += f", {more:.0%} more than {second['plan']}"
    errors = [row["loss_error"] for row in rows if row["loss_error"] is not None]
    if others and errors:
        text += f"; their losses differ by {max(errors):.1e} at most"
    return f"{text}."


def _cards(rows: Sequence[JsonObject], runs: Sequence[ComparedRun]) -> tuple[Card, ...]:
    """The numbers of the fastest plan, each with its prediction in small letters."""
    number = max(range(len(rows)), key=lambda index: rows[index]["tokens_per_second"])
    row = rows[number]
    guess = runs[number].predicted
    loss = row["final_loss"]
    sent = sum(row["traffic"].values())

    def beside(text: Callable[[JsonMapping], str]) -> str:
        return "" if guess is None else f"predicted {text(guess)}"

    return (
        Card("fastest plan", row["plan"]),
        Card("loss", "-" if loss is None else f"{loss:.4f}"),
        Card(
            f"{row['unit']} a second",
            f"{row['tokens_per_second']:,.0f}",
            beside(lambda one: f"{one['tokens_per_second']:,.0f}"),
        ),
        Card(
            "a step",
            f"{(row['step_seconds_median'] or 0) * 1e3:,.1f} ms",
            beside(lambda one: f"{one['step_seconds'] * 1e3:,.1f} ms"),
        ),
        Card(
            "bubble",
            f"{row['bubble_fraction']:.1%}",
            beside(lambda one: f"{one['bubble_fraction']:.1%}"),
        ),
        Card(
            "peak memory",
            size_words(max(row["peak_memory"])),
            beside(lambda one: size_words(one["memory"]["total"])),
        ),
        Card(
            "sent by a rank",
            size_words(sent),
            beside(lambda one: size_words(sum(one["traffic"].values()))),
        ),
    )


def _predicted(rows: Sequence[JsonObject], runs: Sequence[ComparedRun]) -> list[PageSection]:
    """A table of measured numbers beside predicted ones; no section without a prediction."""
    grid_rows = []
    for row, run in zip(rows, runs, strict=True):
        guess = run.predicted
        if guess is None:
            continue
        pairs = (
            (
                f"{(row['step_seconds_median'] or 0) * 1e3:,.1f}",
                f"{guess['step_seconds'] * 1e3:,.1f}",
            ),
            (f"{row['tokens_per_second']:,.0f}", f"{guess['tokens_per_second']:,.0f}"),
            (f"{row['bubble_fraction']:.1%}", f"{guess['bubble_fraction']:.1%}"),
        )
        grid_rows.append((row["plan"], *(f"{own} / {other}" for own, other in pairs)))
    names = ("plan", "ms/step", f"{rows[0]['unit']}/s", "bubble")
    grid = Grid(names, tuple(grid_rows), wide=True)
    return [PageSection("Measured / predicted", [grid])] if grid_rows else []


def _parts(breakdown: JsonObject) -> tuple[tuple[str, float], ...]:
    waiting = [
        (f"waiting for {axis}", seconds)
        for axis, seconds in sorted(breakdown["waiting_seconds"].items())
    ]
    return (
        ("computing", breakdown["compute_seconds"]),
        *(part for part in waiting if part[1] > 0),
        ("other", breakdown["other_seconds"]),
    )


def _traffic(row: JsonObject, run: ComparedRun) -> Iterator[Bar]:
    yield Bar(row["plan"], tuple(row["traffic"].items()))
    if run.predicted is not None:
        sent = {axis: count for axis, count in run.predicted["traffic"].items() if count}
        yield Bar(f"{row['plan']}, predicted", tuple(sent.items()))


def _memory(row: JsonObject, run: ComparedRun) -> Iterator[Bar]:
    """The state of each rank by kind, and what was predicted for the fullest."""
    for rank, kinds in enumerate(row["state_memory"][:MOST_RANKS]):
        yield Bar(f"{row['plan']}, rank {rank}", tuple(kinds.items()))
    if run.predicted is not None:
        kinds = {name: run.predicted["memory"][name] for name in STATE}
        yield Bar(f"{row['plan']}, predicted, fullest rank", tuple(kinds.items()))


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
