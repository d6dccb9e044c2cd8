"""The two questions of `plait plan` that are about many numbers of devices: `--sweep`, and a budget
of days and money.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.answer import Answer, Json
from plait.cli.estimate import size
from plait.cli.layout import PlanTable, Prose
from plait.cli.parser import UsageError
from plait.errors import WRITE_ELSEWHERE, ConfigError
from plait.values import JsonMapping

if TYPE_CHECKING:
    from rich.console import RenderableType

    from plait.cluster import Cluster
    from plait.predict.planner.budget import Offer
    from plait.predict.planner.sweep import SweepPoint

NAMES = {"num_devices": "devices", "batch": "samples a step", "length": "tokens a sample"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--sweep` with its picture, and the budget."""
    parser.add_argument(
        "--sweep",
        nargs="+",
        metavar="KEY=VALUES",
        help="print a table of the best plan for each value of devices=8..1024, batch=64,128 "
        "(samples a step) or length=4096 (tokens a sample)",
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="also draw the sweep into an SVG file"
    )
    parser.add_argument(
        "--days",
        type=float,
        metavar="D",
        help="with --tokens: find the fewest devices of the cluster that finish in D days",
    )
    parser.add_argument(
        "--dollars",
        type=float,
        metavar="USD",
        help="with --tokens: the most that the run may cost; --objective cost finds the cheapest",
    )


@dataclass(frozen=True)
class _Options:
    """The options beside the config that every search has."""

    framework: str
    risk: float | None
    fix: str


def _asked(arguments: argparse.Namespace) -> _Options:
    return _Options(arguments.framework, arguments.risk, arguments.fix)


def sweep_answer(tables: JsonMapping, cluster: Cluster, arguments: argparse.Namespace) -> Answer:
    """The table of `--sweep`; the exit code is 1 when nothing fits at any point.

    Raises:
        ConfigError: the drawing cannot be written.
    """
    from plait.predict.cost.campaign import campaign
    from plait.predict.planner.sweep import SweepAxes, sweep

    asked = _asked(arguments)
    points = sweep(
        tables,
        cluster,
        SweepAxes.parse(arguments.sweep),
        objective=arguments.objective,
        framework=asked.framework,
        risk=asked.risk,
        fix=asked.fix,
    )
    rows: list[Json] = []
    for point in points:
        row: Json = {"num_devices": point.num_devices, "batch": point.batch, "length": point.length}
        if point.best is None:
            rows.append({**row, "plan": None, "reason": point.reason})
        else:
            run = campaign(point.best, arguments.tokens, arguments.mtbf)
            rows.append({**row, **point.best.as_dict(), **run})
    data: Json = {"sweep": rows, "objective": arguments.objective, "cluster": cluster.name}
    if arguments.svg is not None:
        try:
            arguments.svg.write_text(drawn(points), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write {arguments.svg}: {error.strerror}; {WRITE_ELSEWHERE}"
            ) from error
    fits = any(point.best is not None for point in points)
    return Answer(data, partial(_sweep_view, rows), ok=fits)


def drawn(points: list[SweepPoint]) -> str:
    """Tokens a second of one device over the swept key with most values, a line for each of the
    others.
    """
    from plait.trace.curves import Curve, curves

    values = {key: sorted({getattr(one, key) or 0 for one in points}) for key in NAMES}
    along = max(values, key=lambda key: len(values[key]))
    others = [key for key in NAMES if key != along and len(values[key]) > 1]
    pairs = {(one.num_devices, one.batch) for one in points}
    if along == "num_devices" and len(pairs) == len(values["num_devices"]):
        others = [key for key in others if key != "batch"]  # it grows with the devices
    lines: dict[str, list[SweepPoint]] = {}
    for one in points:
        if one.best is not None:
            name = ", ".join(f"{getattr(one, key):,} {NAMES[key]}" for key in others)
            lines.setdefault(name, []).append(one)
    series = []
    for name, own in lines.items():
        places = [(float(getattr(one, along)), _each(one)) for one in own]
        hints = tuple(str(one.best.plan) for one in own if one.best is not None)
        series.append(Curve(name, tuple(places), hints))
    unit = next((one.best.unit for one in points if one.best is not None), "tokens")
    return curves(series, NAMES[along], f"{unit} a second of one device, predicted")


def _each(point: SweepPoint) -> float:
    best = point.best
    return 0.0 if best is None else best.tokens_per_second / best.num_devices


def _sweep_view(rows: list[Json]) -> RenderableType:
    from rich.console import Group

    unit = next((row["unit"] for row in rows if "unit" in row), "tokens")
    head: tuple[str, ...] = ("plan", "devices", "batch", "length", "step", f"{unit}/s")
    head = (*head, f"{unit}/s each", "MFU", "memory", f"USD/M {unit}")
    if any("days" in row for row in rows):
        head = (*head, "days")
    table = PlanTable(head, tuple(_sweep_cells(row, len(head)) for row in rows))
    reasons = [
        f"{row['num_devices']} devices: {row['reason']}" for row in rows if row["plan"] is None
    ]
    return Group(table, Prose("\n".join(["", *reasons]))) if reasons else table


def _sweep_cells(row: Json, width: int) -> tuple[str, ...]:
    asked = tuple(str(row[key] or "") for key in NAMES)
    if row["plan"] is None:
        return ("no plan", *asked, *[""] * (width - 4))
    cells = (
        row["plan"],
        *asked,
        f"{row['step_seconds']:.4g} s",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['tokens_per_second_per_device']:,.0f}",
        f"{row['mfu']:.1%}",
        size(row["memory"]["total"]),
        f"{row['cost_per_million_tokens']:.3g}",
    )
    return (*cells, _days(row["days"])) if "days" in row else cells


def _days(days: float) -> str:
    """Days for people; `never` where failures leave no useful work."""
    return f"{days:,.1f}" if math.isfinite(days) else "never"


def is_budget(arguments: argparse.Namespace) -> bool:
    """Whether days or money are given. Errors: `UsageError` where they have no tokens."""
    if arguments.days is None and arguments.dollars is None:
        return False
    if arguments.tokens is None:
        raise UsageError("--days and --dollars are of a run: say its tokens, as --tokens 15e12")
    if arguments.sweep is not None:
        raise UsageError("--sweep and a budget are two questions: ask one of them")
    return True


def budget_offer(
    tables: JsonMapping, cluster: Cluster, arguments: argparse.Namespace
) -> tuple[Offer | None, Json]:
    """The offer within the budget, and the part of the answer that says what was looked at."""
    from plait.predict.planner.budget import Budget, within_budget

    asked = _asked(arguments)
    budget = Budget(arguments.tokens, arguments.days, arguments.dollars, arguments.mtbf)
    offer, tried = within_budget(
        tables,
        cluster,
        budget,
        cheapest=arguments.objective == "cost",
        framework=asked.framework,
        risk=asked.risk,
        fix=asked.fix,
    )
    found: Json = {
        "days": arguments.days,
        "dollars": arguments.dollars,
        "num_devices": offer.num_devices if offer else None,
        "tried": [one.as_dict() for one in tried],
    }
    if offer is None:
        found["reason"] = _why_none(tried, cluster, arguments)
    return offer, found


def _why_none(tried: list[Offer], cluster: Cluster, arguments: argparse.Namespace) -> str:
    limits = [f"{arguments.days:g} days"] if arguments.days is not None else []
    limits += [f"{_dollars(arguments.dollars)} USD"] if arguments.dollars is not None else []
    base = (
        f"no number of devices up to the {cluster.num_devices} of {cluster.name} trains "
        f"{arguments.tokens:.4g} tokens in {' and '.join(limits)}"
    )
    ran = [one for one in tried if one.choice is not None]
    if not ran:
        return f"{base}: {tried[-1].reason}"
    fastest = min(ran, key=lambda one: one.days)
    cheapest = min(ran, key=lambda one: one.dollars)
    if not math.isfinite(fastest.days):
        return f"{base}: devices fail so often that no useful work remains; --mtbf is in hours"
    sizes = ", ".join(str(one.num_devices) for one in ran)
    return (
        f"{base}: of the numbers that were looked at ({sizes}), the fastest run takes "
        f"{fastest.days:,.1f} days on {fastest.num_devices}, and the cheapest costs "
        f"{_dollars(cheapest.dollars)} USD on {cheapest.num_devices}; {_cure(arguments)}"
    )


def _dollars(amount: float) -> str:
    """An amount in words of people: whole dollars from ten on, and never 0 for less than one."""
    return f"{amount:,.0f}" if amount == 0 or amount >= 10 else f"{amount:.2g}"


def _cure(arguments: argparse.Namespace) -> str:
    """The limits that are to be loosened, of those that were given."""
    more = [f"more {name}" for name in ("days", "dollars") if getattr(arguments, name) is not None]
    return " or ".join(["name a larger cluster", *more] if arguments.days is not None else more)


def budget_lines(found: Json) -> list[str]:
    """The numbers of devices that were looked at, for people."""
    rows = [
        f"{one['num_devices']} devices: {one['days']:,.1f} days, {one['price']:,.0f} USD"
        for one in found["tried"]
        if one["plan"] is not None and math.isfinite(one["days"])
    ]
    return [f"looked at  {'; '.join(rows)}"]
