"""`plait schedule`: a pipeline schedule as a grid, with what it wastes, holds and keeps, before
anything runs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli import schedule_page
from plait.cli.answer import Answer, Json
from plait.cli.layout import Prose
from plait.errors import WRITE_ELSEWHERE, PlanError, ScheduleError
from plait.parallel.pipeline import render, text
from plait.parallel.pipeline.actions import Action, Kind, Schedule
from plait.parallel.pipeline.clock import unit
from plait.parallel.pipeline.schedules import SCHEDULES, make
from plait.parallel.pipeline.simulate import Simulation, simulate
from plait.plan import Plan
from plait.toml import is_file

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

MEANING = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
}
STREAM_STEPS = 3
"""Steps of an asynchronous schedule that are simulated once its pipeline is full."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait schedule`."""
    parser.add_argument(
        "name", metavar="NAME", help=f"{', '.join(SCHEDULES)} (or interleaved,v3), or a text file"
    )
    parser.add_argument(
        "--stages",
        type=int,
        metavar="P",
        help="ranks of the pipeline (default 4; a file says its own)",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="M",
        help="micro-batches a step (default 2P; a file says its own)",
    )
    parser.add_argument(
        "--virtual", type=int, metavar="V", help="stages on a rank, for interleaved (default 2)"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write one page with the timeline and the numbers",
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="also draw the grid into an SVG file"
    )


def run(arguments: argparse.Namespace) -> Answer:
    """The grid and its numbers; ScheduleError (with the grid of what is wrong) for a schedule that
    cannot run.
    """
    drawn, measured = _schedules(arguments)
    result = simulate(measured)
    pages = {
        arguments.svg: lambda: render.svg(drawn),
        arguments.html: lambda: schedule_page.html(drawn, result),
    }
    for path, drawn_page in pages.items():
        if path is None:
            continue
        try:
            path.write_text(drawn_page(), encoding="utf-8")
        except OSError as error:
            raise ScheduleError(
                f"cannot write {path}: {error.strerror}; {WRITE_ELSEWHERE}"
            ) from error
    return Answer(as_dict(drawn, result), partial(_view, drawn, result))


def _schedules(arguments: argparse.Namespace) -> tuple[Schedule, Schedule]:
    """Two schedules: one step, which is drawn, and some steps, where they overlap, for the
    numbers.
    """
    name, _, suffix = arguments.name.partition(",v")
    if name not in SCHEDULES and is_file(arguments.name):
        options = [
            flag
            for flag in ("stages", "microbatches", "virtual")
            if getattr(arguments, flag) is not None
        ]
        if options:
            raise ScheduleError(
                f"{arguments.name} says its own shape; leave out --{' --'.join(options)}"
            )
        loaded = text.load(arguments.name)
        return loaded, loaded
    if name not in SCHEDULES:
        _check_no_plan(arguments.name)
    if suffix and not re.fullmatch("[0-9]{1,9}", suffix):
        raise ScheduleError(f"'{arguments.name}': say interleaved,v2")
    virtual = int(suffix) if suffix else arguments.virtual
    if virtual == 0:  # which would silently mean the usual number
        raise ScheduleError(f"{name}: 0 stages on a rank; take 2 or more, as interleaved,v2")
    virtual = virtual or 0
    stages = 4 if arguments.stages is None else arguments.stages
    micro_batches = 2 * stages if arguments.microbatches is None else arguments.microbatches
    check_drawable(name, stages, micro_batches, virtual)
    drawn = make(name, stages, micro_batches, virtual)
    if not drawn.asynchronous:
        return drawn, drawn
    steps_to_fill = -(-2 * (stages - 1) // micro_batches)
    num_steps = steps_to_fill + STREAM_STEPS
    return drawn, make(name, stages, micro_batches, virtual, num_steps=num_steps)


def _check_no_plan(words: str) -> None:
    """Raises `ScheduleError` for a plan in the place of a schedule, with the command that is
    meant.
    """
    try:
        plan = Plan.parse(words)
    except PlanError:
        return
    if plan.pp.size == 1:
        raise ScheduleError(
            f"'{words}' is a plan without stages, so it has no schedule; "
            "name one, as in plait schedule 1f1b --stages 4 --microbatches 8"
        )
    name = str(plan.pp).partition(":")[2] or plan.pp.schedule
    raise ScheduleError(
        f"'{words}' is a plan; say its schedule alone: plait schedule {name} --stages "
        f"{plan.pp.size} --microbatches {plan.micro_batches}"
    )


MOST_CELLS = 400_000
"""Cells of a grid (ranks x slots) that are drawn: seconds of work and megabytes of text."""


def check_drawable(name: str, stages: int, micro_batches: int, virtual: int) -> None:
    """Raises `ScheduleError` for a grid too large to look at."""
    a_rank = virtual
    if name in SCHEDULES:
        a_rank = virtual or SCHEDULES[name].facts.default_virtual
    cells = 3 * stages * a_rank * (stages + micro_batches)
    if min(stages, micro_batches) >= 1 and cells > MOST_CELLS:
        raise ScheduleError(
            f"{name} on {stages} ranks with {micro_batches} micro-batches is a grid of about "
            f"{cells:.3g} cells, and at most {MOST_CELLS:,} are drawn; take fewer of either "
            "(a schedule looks alike from a few ranks on)"
        )


def as_dict(schedule: Schedule, result: Simulation) -> Json:
    """The keys of `--json`; `grid` has a line a rank, one word a slot: an action, `-` while it
    lasts, `.` idle.
    """
    return {
        "name": schedule.name,
        "stages": schedule.num_stages,
        "ranks": schedule.num_ranks,
        "micro_batches": schedule.num_micro_batches,
        "grid": [line.partition("| ")[2] for line in render.grid(schedule).splitlines()],
        "bubble_fraction": result.bubble_fraction,
        "barrier_bubble_fraction": result.barrier_bubble_fraction,
        "peak_activations": list(result.peak_activations),
        "peak_activations_per_rank": list(result.peak_activations_per_rank),
        "weight_versions": list(result.weight_versions),
        "staleness": list(result.staleness),
    }


def _view(schedule: Schedule, result: Simulation) -> RenderableType:
    from rich.console import Group

    class GridView:
        """The grid as wide as the terminal."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
            yield render.coloured(schedule, options.max_width)

    barrier = f" ({result.barrier_bubble_fraction:.1%} with a barrier after each step)"
    lines = ["", *legend(schedule)]
    lines += [
        f"bubble               {result.bubble_fraction:.1%}"
        + (" in the steady state" if schedule.asynchronous else "")
        + (barrier if abs(result.barrier_bubble_fraction - result.bubble_fraction) > 1e-9 else ""),
        f"live activations     {_list(result.peak_activations)}   micro-batches, by stage",
    ]
    if schedule.num_stages > schedule.num_ranks:
        lines.append(
            f"                     {_list(result.peak_activations_per_rank)}   of a rank's whole "
            "share, by rank"
        )
    lines += [
        f"weight versions      {_list(result.weight_versions)}   by stage",
        f"staleness            {_list(result.staleness)}   updates, by stage",
    ]
    return Group(GridView(), Prose("\n".join(lines)))


def legend(schedule: Schedule) -> list[str]:
    """The letters that stand in the grid, and the time of each kind of action there."""
    cells = [cell for row in render.rows(schedule) for cell in row]
    kinds = {cell.action.kind for cell in cells}
    shown = [kind for kind in MEANING if kind in kinds]
    words = [f"{kind.value} {MEANING[kind]}" for kind in shown]
    if any(cell.updated for cell in cells):
        words.append("U: the weights are updated after it")
    lasting: dict[float, list[str]] = {}
    for kind in shown:
        lasting.setdefault(unit(Action(kind, 0, 0)), []).append(kind.value)
    times = (f"{' = '.join(letters)} = {seconds:g}" for seconds, letters in sorted(lasting.items()))
    return ["  ".join(words), f"times: {', '.join(times)}"]


def _list(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
