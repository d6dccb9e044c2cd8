"""`plait explain`: one strategy, step by step, from a recorded run of the real code."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli import common, explain_page
from plait.cli.answer import Answer
from plait.errors import NotAvailable
from plait.explain.term import read_term
from plait.launcher import joined_world
from plait.launcher.patience import telling

if TYPE_CHECKING:
    from plait.explain.explanation import Explanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait explain`."""
    parser.add_argument(
        "term",
        metavar="TERM",
        nargs="+",
        help="a term of a plan: dp4:ring, dp4:zero3, tp4:2d, tp8:3d, 'pp4:1f1b mb8', ep4, cp4:ring",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write one page that goes through the steps"
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Run the small case of the term on simulated ranks. Errors: `PlanError`, `NotAvailable`."""
    if arguments.html is not None:
        common.check_writable(arguments.html)
    explanation = explained(" ".join(arguments.term))
    if arguments.html is not None:
        arguments.html.write_text(explain_page.html(explanation), encoding="utf-8")
    from rich.text import Text

    from plait.explain.text import lines

    return Answer(explanation.as_dict(), Text("\n".join(lines(explanation))))


def explained(term: str) -> Explanation:
    """The recorded run of a term; a line on stderr where it takes a while. Errors: `PlanError`,
    `NotAvailable`.
    """
    word = term.strip().partition(":")[0].lower()
    if word == "fl" or word.startswith("fed"):
        raise NotAvailable(
            "federated training is no term of a plan: clients, not ranks, hold the data, and "
            "plait federated runs them; explain shows terms such as dp4:local,every2"
        )
    num_ranks = read_term(term).plan.world_size
    if joined_world() is not None:
        raise NotAvailable(
            "explain runs its ranks as threads of one process; start it once, without torchrun"
        )
    with telling("explain", "loading torch") as now:
        from plait.explain.explanation import explain

        ranks = f"{num_ranks} ranks" if num_ranks > 1 else "one rank"
        now(f"running the small case of '{term.strip()}' on {ranks}")
        return explain(term)
