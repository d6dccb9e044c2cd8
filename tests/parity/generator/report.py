"""The report of a run of the generator: how many, which failed, how far off the worst is, and what
was covered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.plan import Plan
from tests.parity.generator.cell import Cell
from tests.parity.generator.run import Verdict
from tests.parity.harness import TOLERANCE


@dataclass(frozen=True)
class Row:
    """A cell that has run; `smallest` is what it shrank to, if it failed."""

    number: int
    seed: int
    cell: Cell
    verdict: Verdict
    smallest: Cell | None = None

    @staticmethod
    def of(given: dict[str, Any]) -> Row:
        smallest = given["smallest"]
        return Row(
            given["number"],
            given["seed"],
            _cell(given["cell"]),
            Verdict(**given["verdict"]),
            None if smallest is None else _cell(smallest),
        )


def _cell(given: dict[str, Any]) -> Cell:
    return Cell(**{**given, "frozen": tuple(given["frozen"])})


def report(rows: Sequence[Row], wanted: int, seed: int, note: str = "") -> str:
    by = {
        status: [row for row in rows if row.verdict.status == status]
        for status in ("ok", "refused", "undecided", "failed")
    }
    ran = [*by["ok"], *by["failed"]]
    worst = max(ran, key=lambda row: row.verdict.error, default=None)
    lines = [
        "# Random plans against one device",
        "",
        "Written by `python -m tests.parity.generator`; the first 100 cells run in CI "
        "(`tests/parity/test_generator.py`).",
        "A cell is a random valid plan with a random small model. Plans have every axis, option "
        "and micro-batching, up to 8 ranks.",
        "The batch need not divide evenly. Some cells have clipping or frozen parameters. Loss, "
        "norm, every gradient and every parameter",
        f"of two steps are compared with one device in float64; {TOLERANCE:.0e} passes. "
        "Asynchronous pipelines are compared",
        "with one device that applies the same delayed gradients, over five steps and a flush.",
        *(["", note] if note else []),
        "",
        "| cells | number |",
        "|---|---|",
        f"| drawn (seed {seed}) | {len(rows)} of {wanted} |",
        f"| equal to one device | {len(by['ok'])} |",
        f"| refused with a reason, alike on every rank | {len(by['refused'])} |",
        f"| undecided: one device, started one bit aside, drifts as far | {len(by['undecided'])} |",
        f"| failed | {len(by['failed'])} |",
        "",
    ]
    if worst is not None:
        v = worst.verdict
        lines += [
            f"Largest relative error: {v.error:.1e} ({v.kind} of `{v.worst}`, cell "
            f"{worst.number}, `{worst.cell.plan}`,"
        ]
        lines += [
            f"{worst.cell.kind}). Sum of the cells' times: "
            f"{sum(row.verdict.seconds for row in rows):,.0f} s.",
            "",
        ]
    lines += ["## Failed", "", *([_failure(row) for row in by["failed"]] or ["None."]), ""]
    if by["undecided"]:
        lines += ["## Undecided", "", *(_failure(row) for row in by["undecided"]), ""]
    lines += ["## Refused", "", *_refusals(by["refused"]), ""]
    lines += [
        "## Covered",
        "",
        "Cells that ran, by what they hold.",
        "",
        "| what | cells | largest error |",
        "|---|---|---|",
    ]
    lines += _covered(ran)
    return "\n".join(lines) + "\n"


def _failure(row: Row) -> str:
    v = row.verdict
    what = (
        v.message.strip().splitlines()[-1]
        if v.message
        else f"{v.kind} {v.error:.1e} {v.worst}".strip()
    )
    smallest = f"; smallest: `{row.smallest}`" if row.smallest else ""
    return f"- cell {row.number}, `{row.cell.plan}` on {row.cell.kind}: {what}{smallest}"


def _refusals(rows: Sequence[Row]) -> list[str]:
    reasons = Counter(_reason(row) for row in rows)
    return [f"- {count} x {reason}" for reason, count in reasons.most_common()] or ["None."]


def _reason(row: Row) -> str:
    """The first line, without the plan that it names."""
    first = row.verdict.message.splitlines()[0]
    return first.replace(f"'{row.cell.plan}': ", "").replace(row.cell.plan, "PLAN")


def _covered(rows: Sequence[Row]) -> list[str]:
    errors: dict[str, list[float]] = {}
    for row in rows:
        for word in sorted(set(_words(row.cell))):
            errors.setdefault(word, []).append(row.verdict.error)
    return [
        f"| {word} | {len(found)} | {max(found):.1e} |" for word, found in sorted(errors.items())
    ]


def _words(cell: Cell) -> list[str]:
    plan = Plan.parse(cell.plan)
    axes = [
        name
        for name, axis in (("pp", plan.pp), ("tp", plan.tp), ("dp", plan.dp), ("cp", plan.cp))
        if axis.size > 1
    ]
    words = [f"model {cell.kind}", f"ranks {plan.world_size}", f"axes {len(axes) + (plan.ep > 1)}"]
    words += [f"pair {a} x {b}" for i, a in enumerate(axes) for b in axes[i + 1 :]]
    words += [f"ep with {a}" for a in axes] if plan.ep > 1 else []
    words += [f"pp {plan.pp.schedule}"] if plan.pp.size > 1 else []
    words += (
        [f"tp {plan.tp.mode}{',sp' if plan.tp.sequence_parallel else ''}"]
        if plan.tp.size > 1
        else []
    )
    words += (
        [f"dp {plan.dp.strategy}{',replicate' if plan.dp.replicate > 1 else ''}"]
        if plan.dp.size > 1
        else []
    )
    words += [f"cp {plan.cp.strategy}"] if plan.cp.size > 1 else []
    words += [f"remat {plan.remat}"] if plan.remat != "none" else []
    words += ["several micro-batches"] if plan.micro_batches > 1 else []
    words += ["clipping"] if cell.clip is not None else []
    words += ["frozen parameters"] if cell.frozen else []
    words += ["offload"] if plan.dp.offload else []
    return words
