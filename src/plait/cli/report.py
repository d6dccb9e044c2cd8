"""`plait report`: the folder of a run as one HTML page, what was promised above what was
measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from plait.cli import common
from plait.cli.answer import Answer, Json
from plait.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait report`."""
    common.add_run(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="where the page goes (default: RUN_DIR/report.html)",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Write the page. Errors: `ConfigError` for a folder that is no run's, or a page that cannot be
    written.
    """
    from plait.cli.advice import advice_for_run
    from plait.explore.html import drawing
    from plait.run.report_page import pictures_of, report_page
    from plait.run.rundata import read_run
    from plait.trace.page import Drawing

    folder = common.run_folder(arguments.folder)
    data = read_run(folder)
    out = folder / "report.html" if arguments.out is None else arguments.out
    script = Drawing(*drawing(pictures_of(data)))
    text = report_page(data, script, advice_for_run(data))
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    result = {"out": str(out), **data.numbers()}
    return Answer(result, view(result, data.why_no_prediction))


def view(result: Json, why_no_prediction: str = "") -> str:
    """The page in three lines, for people."""

    def line(name: str, seconds: float | None, bubble: float | None, what: str) -> str:
        if seconds is None or bubble is None:
            return f"{name:<12}{'-':>10}   {what}"
        return f"{name:<12}{seconds * 1e3:8.1f} ms   bubble {bubble:6.1%}   {what}"

    where = (
        f"cost model, cluster {result['predicted_for']}"
        if result["predicted_for"]
        else f"not made: {why_no_prediction}"
    )
    return "\n".join(
        [
            line(
                "predicted",
                result["predicted_step_seconds"],
                result["predicted_bubble_fraction"],
                where,
            ),
            line(
                "simulated",
                result["simulated_step_seconds"],
                result["simulated_bubble_fraction"],
                "that step's own times, waits left out",
            ),
            line(
                "measured",
                result["measured_step_seconds"],
                result["measured_bubble_fraction"],
                "median traced step",
            ),
            f"written to {result['out']}",
        ]
    )
