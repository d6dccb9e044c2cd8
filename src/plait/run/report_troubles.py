"""The sections of a run's page on what went wrong: recoveries, findings, and errors of ranks."""

from __future__ import annotations

from plait.doctor import findings
from plait.run import health
from plait.run.rundata import RunData
from plait.run.rundir import RunFolder
from plait.trace.page import Grid, PageSection
from plait.trace.units import milliseconds
from plait.values import JsonMapping


def recoveries_of(data: RunData) -> list[PageSection]:
    """The recoveries, and what was spent on them; no section where there is nothing of it."""
    recoveries = data.summary.get("recoveries") or []
    waits = [
        f"{num} {what}s took {milliseconds(waited['seconds'] / num)} of waiting each"
        if num > 1
        else f"1 {what} took {milliseconds(waited['seconds'])} of waiting"
        for what in ("snapshot", "checkpoint")
        if (waited := data.summary.get(f"{what}s")) and (num := waited["count"])
    ]
    parts: list[str | Grid] = []
    if recoveries:
        header = ("step", "lost ranks", "cause", "seconds", "plan", "steps repeated")
        parts.append(Grid(header, tuple(_recovery(one) for one in recoveries), ("cause", "plan")))
    if waits:
        parts.append(f"{'; '.join(waits)}.")
    title = "Recoveries and their cost" if recoveries else "Snapshots and checkpoints"
    return [PageSection(title, parts)] if parts else []


def _recovery(one: JsonMapping) -> tuple[str, ...]:
    """A row of the table."""
    before, after = one["plan_before"], one["plan_after"]
    seconds = one.get("seconds")
    repeated = one.get("steps_repeated")
    return (
        str(one["step"]),
        ", ".join(map(str, one["lost_ranks"])) or "-",
        one["cause"],
        "-" if seconds is None else f"{seconds:.2f}",
        before if before == after else f"{before}, then {after}",
        "-" if repeated is None else str(repeated),
    )


def findings_of(data: RunData) -> list[PageSection]:
    """The findings of the doctor; no section where there is none."""
    entries = findings.read(RunFolder(data.folder).doctor)
    rows = tuple(
        (
            str(one["kind"]),
            "-" if one["rank"] is None else str(one["rank"]),
            "-" if one["step"] is None else str(one["step"]),
            str(one["where"]),
            str(one["cause"]),
            str(one["line"] or "-"),
        )
        for one in entries
    )
    header = ("kind", "rank", "step", "where", "cause", "line")
    return (
        [PageSection("Findings of the doctor", [Grid(header, rows, ("where", "cause", "line"))])]
        if rows
        else []
    )


def errors_of(data: RunData) -> list[PageSection]:
    """The error that ended each rank of a run that stopped early; no section where there is none.

    Logs and records of this machine are read.
    """
    if data.steps:
        return []
    errors = health.findings_of(data.folder)["errors"]
    rows = tuple((str(one["rank"]), str(one["step"]), str(one["error"])) for one in errors)
    grid = Grid(("rank", "after step", "error"), rows, ("error",))
    return [PageSection("Errors of ranks", [grid])] if rows else []
