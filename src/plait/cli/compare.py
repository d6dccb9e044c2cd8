"""`plait compare`: the same training under several plans, one after the other, their numbers side
by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli import advice, common
from plait.cli.answer import Answer, Json
from plait.cli.layout import PlanTable
from plait.cli.recomputation import with_remat
from plait.cli.train import launched
from plait.errors import PlaitError, PlanError
from plait.explore.html import drawing
from plait.launcher.main_process import is_main_process, say
from plait.plan import Plan
from plait.run import comparison, job
from plait.trace.page import Drawing

if TYPE_CHECKING:
    from plait.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait compare`."""
    common.add_config(parser)
    parser.add_argument(
        "--plans",
        nargs="+",
        required=True,
        metavar="TEXT",
        help="the plans; each loss is compared with that of the first",
    )
    common.add_steps(parser)
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write a page with the table, curves and timelines",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """A row a plan. Every plan is checked before the first one runs."""
    config = common.read_config(arguments)
    plans = checked(config, arguments.plans)
    if arguments.html is not None and is_main_process():
        common.check_writable(arguments.html)
    rows: list[Json] = []
    timelines = []
    courses = []
    for number, plan in enumerate(plans, start=1):
        say(f"plait compare: {plan} ({number} of {len(plans)})")
        own = with_remat(config, plan)
        result = launched(job.TrainingRun(own, str(plan), keeps_timeline=True), plan.world_size)
        timelines.append(result.pop("timeline", None))
        courses.append(result.pop("course", ()))
        rows.append({**result, "loss_error": loss_error(result, rows[0] if rows else result)})
    if arguments.html is not None and is_main_process():
        runs = [compared(config, *one) for one in zip(rows, courses, strict=True)]
        script = Drawing(*drawing(comparison.pictures_of(rows, timelines, runs)))
        title = f"Plans compared: {Path(arguments.config).stem}"
        text = comparison.html(title, rows, timelines, runs, script)
        arguments.html.write_text(text, encoding="utf-8")
        say(f"plait compare: {arguments.html}")
    return Answer({"rows": rows}, view(rows)) if is_main_process() else Answer(None)


def checked(config: Config, texts: Sequence[str]) -> list[Plan]:
    """The plans. All that cannot run are named in one error, which is that of the first.

    Raises `PlanError` for several plans in one text, and what `common.plan_of` raises.
    """
    plans = []
    errors: list[PlaitError] = []
    for text in texts:
        try:
            if ";" in text:
                each = " ".join(repr(one.strip()) for one in text.split(";") if one.strip())
                raise PlanError(f"{text!r}: a blank parts two plans; write --plans {each}")
            plans.append(common.plan_of(config, text))
        except PlaitError as failure:
            errors.append(failure)
    if not errors:
        return plans
    if len(errors) == 1:
        raise errors[0]
    sentences = "".join(f"\n  {one}" for one in errors)
    raise type(errors[0])(f"{len(errors)} of {len(texts)} plans cannot run:{sentences}")


def compared(config: Config, row: Json, course: Sequence[Json]) -> comparison.ComparedRun:
    """The run of one plan, with its prediction and what to try next, where there are any."""
    from plait.run.rundata import predict

    plan = Plan.parse(row["plan"])
    prediction, _ = predict(config.as_dict(), plan)
    sentences = advice.waits(row["breakdown"])
    if prediction is None:
        return comparison.ComparedRun(course, None, sentences)
    sentences += advice.limits(prediction.numbers)
    with suppress(PlaitError):
        sentences += advice.proposals(config.as_dict(), plan)
    return comparison.ComparedRun(course, prediction.numbers, sentences)


def loss_error(result: Json, first: Json) -> float | None:
    """The relative difference of the final losses; None when no step was done."""
    own = result["final_loss"]
    other = first["final_loss"]
    if own is None or other is None:
        return None
    return float(abs(own - other) / abs(other)) if other else float(abs(own))


def view(rows: list[Json]) -> PlanTable:
    """The table for people; memory and traffic are those of the fullest and the busiest rank."""
    return PlanTable(comparison.head(rows), tuple(comparison.cells(row) for row in rows))
