"""`plait compare`: the same training under several plans, one after the other, their numbers side
by side.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from plait.cli import common
from plait.cli.answer import Answer, Json
from plait.cli.layout import PlanTable
from plait.cli.train import launched
from plait.launcher.main_process import is_main_process, say
from plait.run import comparison, job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait compare`."""
    common.add_config(parser)
    parser.add_argument(
        "--plans",
        nargs="+",
        required=True,
        metavar="TEXT",
        help="the plans; errors are against the first",
    )
    common.add_steps(parser)
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write one page with the table, bars and timelines",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """A row a plan. Every plan is checked before the first one runs."""
    config = common.read_config(arguments)
    plans = [common.plan_of(config, text) for text in arguments.plans]
    if arguments.html is not None and is_main_process():
        common.check_writable(arguments.html)
    rows: list[Json] = []
    timelines = []
    for number, plan in enumerate(plans, start=1):
        say(f"plait compare: {plan} ({number} of {len(plans)})")
        result = launched(job.TrainingRun(config, str(plan), keeps_timeline=True), plan.world_size)
        timelines.append(result.pop("timeline", None))
        rows.append({**result, "loss_error": loss_error(result, rows[0] if rows else result)})
    if arguments.html is not None and is_main_process():
        arguments.html.write_text(
            comparison.html(f"Plans compared: {Path(arguments.config).stem}", rows, timelines)
        )
        say(f"plait compare: {arguments.html}")
    return Answer({"rows": rows}, view(rows)) if is_main_process() else Answer(None)


def loss_error(result: Json, first: Json) -> float | None:
    """The relative difference of the final losses; None when no step was done."""
    own = result["final_loss"]
    other = first["final_loss"]
    if own is None or other is None:
        return None
    return float(abs(own - other) / abs(other)) if other else float(abs(own))


def view(rows: list[Json]) -> PlanTable:
    """The table for people; memory and traffic are those of the fullest and the busiest rank."""
    return PlanTable(comparison.HEAD, tuple(comparison.cells(row) for row in rows))
