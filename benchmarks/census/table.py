"""The table of docs/models.md: what each class gave under each plan, and why some are left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PLANS = (
    "dp2:zero3",
    "pp2:1f1b mb2",
    "tp2",
    "tp2:1d,sp",
    "tp4:2d",
    "cp2:ring",
    "cp2:ulysses",
    "dp2 ep2",
    "pp2:1f1b tp2 dp2:zero1 mb2",
)
BEGIN = "<!-- census: written by python -m benchmarks.census -->"
END = "<!-- end of census -->"
LETTER = {"equal": "=", "refused": "r", "wrong": "w", "crashed": "c", "none": ""}
FOLDERS = re.compile(r"(?<![\w./])/(?:[\w.+@~-]+/)+")
"""The folders of an absolute path, which are those of one machine."""

Cells = Mapping[str, Mapping[str, Any]]
Rows = Mapping[tuple[str, str], Cells]


def rows_of(cells: Iterable[Mapping[str, Any]]) -> Rows:
    """Cells by class and plan; a later cell stands for an earlier one."""
    rows: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for cell in cells:
        row = rows.setdefault((str(cell["task"]), str(cell["family"])), {})
        if cell["plan"]:
            row.pop("", None)
        row[str(cell["plan"])] = cell
    return rows


def summary(rows: Rows) -> list[str]:
    """A line a plan: how many classes are equal, refused, wrong and crashed, and the seconds."""
    built = [row for row in rows.values() if "" not in row]
    lines = [f"{len(built)} classes of {len(rows)}; the others have no tiny config that runs"]
    plans = dict.fromkeys(plan for row in built for plan in row)
    for plan in plans:
        cells = [row[plan] for row in built if plan in row and row[plan]["verdict"] != "none"]
        counts = Counter(cell["verdict"] for cell in cells)
        share = 100 * counts["equal"] / max(len(cells), 1)
        seconds = sum(cell["seconds"] for cell in cells)
        others = ", ".join(f"{counts[kind]} {kind}" for kind in ("refused", "wrong", "crashed"))
        lines.append(
            f"{plan}: {counts['equal']} of {len(cells)} equal ({share:.0f} %), {others}; "
            f"{seconds:.0f} s"
        )
    return lines


def write(path: Path, cells: Sequence[Mapping[str, Any]]) -> None:
    """Replace the part of a page between the two marks."""
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = rows_of(cells)
    lines = [BEGIN, "", *_shares(rows), "", *_table(rows), "", *_reasons(rows), "", END]
    path.write_text(before + "\n".join(lines) + after)


def _shares(rows: Rows) -> list[str]:
    first, *others = summary(rows)
    return [f"{first}.", "", *(f"- `{line.replace(': ', '`: ', 1)}" for line in others)]


def _table(rows: Rows) -> list[str]:
    plans = list(PLANS)
    lines = ["| class | " + " | ".join(f"`{plan}`" for plan in plans) + " | seconds |"]
    lines.append("|---" * (len(plans) + 2) + "|")
    for (task, family), row in sorted(rows.items()):
        if "" in row:
            continue
        letters = [LETTER[row[plan]["verdict"]] if plan in row else "-" for plan in plans]
        seconds = sum(cell["seconds"] for cell in row.values())
        lines.append(f"| {family} ({task}) | " + " | ".join(letters) + f" | {seconds:.0f} |")
    return lines


def _reasons(rows: Rows) -> list[str]:
    """Each reason once, with the classes and plans that it keeps out."""
    found: dict[str, dict[str, set[str]]] = {}
    for (_, family), row in sorted(rows.items()):
        for plan, cell in row.items():
            if cell["verdict"] not in ("equal", "none"):
                reason = f"{cell['verdict']}: {_general(str(cell['reason']))}"
                found.setdefault(reason, {}).setdefault(plan, set()).add(family)
    lines = ["Why a class is left out:", ""]
    for reason, plans in sorted(found.items(), key=lambda item: -sum(map(len, item[1].values()))):
        where = "; ".join(
            f"{', '.join(f'`{p}`' for p in sorted(same) if p) or 'every plan'}: {who}"
            for who, same in _by_families(plans).items()
        )
        lines.append(f"- {reason} ({where})")
    return lines


def _by_families(plans: Mapping[str, set[str]]) -> dict[str, set[str]]:
    same: dict[str, set[str]] = {}
    for plan, families in plans.items():
        same.setdefault(", ".join(sorted(families)), set()).add(plan)
    return same


def _general(reason: str) -> str:
    """A reason without what differs from class to class, cut to one line."""
    words = FOLDERS.sub("", reason)
    words = re.sub(r"'[\w.*]+'", "'...'", words)
    words = re.sub(r"\b\d+(\.\d+)?(e[-+]\d+)?\b", "N", words)
    words = words.replace("|", "/").replace("<", "(").replace(">", ")")
    return words if len(words) < 160 else f"{words[:160]} ..."
