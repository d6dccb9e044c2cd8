"""`plait compare`: the same training under several plans, one after the other, their numbers side by side."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from plait.cli import common, job
from plait.cli.answer import Answer
from plait.cli.train import launched

if TYPE_CHECKING:
    from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait compare`."""
    common.add_config(parser)
    parser.add_argument("--plans", nargs="+", required=True, metavar="TEXT", help="the plans; errors are against the first")
    common.add_steps(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """A row a plan. Every plan is checked before the first one runs."""
    config = common.read_config(arguments)
    plans = [common.plan_of(config, text) for text in arguments.plans]
    rows: list[dict[str, Any]] = []
    for number, plan in enumerate(plans, start=1):
        common.say(f"plait compare: {plan} ({number} of {len(plans)})")
        result = launched(job.Job(config, str(plan)), plan.world_size)
        rows.append({**result, "loss_error": loss_error(result, rows[0] if rows else result)})
    return Answer({"rows": rows}, view(rows)) if common.speaks() else Answer(None)


def loss_error(result: dict[str, Any], first: dict[str, Any]) -> float | None:
    """The relative difference of the final losses; None when no step was done."""
    own, other = result["final_loss"], first["final_loss"]
    if own is None or other is None:
        return None
    return float(abs(own - other) / abs(other)) if other else float(abs(own))


def view(rows: list[dict[str, Any]]) -> Table:
    """The table for people; memory and traffic are those of the fullest and the busiest rank."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan", overflow="fold")
    for name in ("loss", "error", "ms/step", "tokens/s", "peak MB", "MB sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["plan"],
            "-" if row["final_loss"] is None else f"{row['final_loss']:.4f}",
            "-" if row["loss_error"] is None else f"{row['loss_error']:.1e}",
            f"{(row['step_seconds_median'] or 0) * 1e3:,.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{max(row['peak_memory']) / 1e6:,.0f}",
            f"{sum(row['traffic'].values()) / 1e6:,.1f}",
        )
    return table
