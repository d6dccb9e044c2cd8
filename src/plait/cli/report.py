"""`plait report`: the folder of a run as one HTML page, what was promised above what was
measured.
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path

from plait.cli import common
from plait.cli.answer import Answer, Json
from plait.errors import ConfigError

FRAME_HEIGHT = 900
"""Pixels of the page in a notebook."""


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
    report = RunReport(arguments.folder)
    out = report.folder / "report.html" if arguments.out is None else arguments.out
    try:
        out.write_text(report.page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}; --out names another") from error
    result = {"out": str(out), **report.numbers}
    return Answer(result, f"{report}\nwritten to {out}")


class RunReport:
    """The report of a run. In a notebook it draws itself; printed, it is a few lines.

    Attributes:
        folder: of the run.
        numbers: step seconds and bubbles, predicted, simulated and measured.
    """

    def __init__(self, folder: str | Path = "latest") -> None:
        """Read the folder of a run. Errors: `ConfigError` for a folder that is no run's."""
        from plait.run.rundata import read_run

        self.folder = common.run_folder(Path(folder))
        self._data = read_run(self.folder)
        self.numbers: Json = self._data.numbers()

    @property
    def page(self) -> str:
        """The page of the run, one file that needs no network."""
        from plait.cli.advice import advice_for_run
        from plait.explore.html import drawing
        from plait.run.report_page import pictures_of, report_page
        from plait.trace.page import Drawing

        script = Drawing(*drawing(pictures_of(self._data)))
        return report_page(self._data, script, advice_for_run(self._data))

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its styles stay there."""
        inside = html.escape(self.page, quote=True)
        style = f"width: 100%; height: {FRAME_HEIGHT}px; border: 0"
        return f'<iframe srcdoc="{inside}" style="{style}"></iframe>'

    def __str__(self) -> str:
        return view(self.numbers, self._data.why_no_prediction)

    def __repr__(self) -> str:
        return f"Report of {self.folder}\n{self}"


Report = RunReport
"""The name at the door: `plait.Report`."""


def view(result: Json, why_no_prediction: str = "") -> str:
    """The numbers in three lines, for people."""

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
        ]
    )
