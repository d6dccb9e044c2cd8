"""The page's rows in the documentation: one section for each processor that it was run on.

`python -m benchmarks --json FILE --docs` replaces the section of its processor in
`docs/measured.md`, or adds one. Ratios are to torch DDP of the same rounds.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks.page.page import Row
from benchmarks.page.systems import CASES, FOOTPRINT_CASES

Footprints = dict[str, dict[str, int | None]]
"""Memory and bytes by system."""
VARIANTS = ("sockets", "shared memory", "as it comes")
PAGE = Path("docs/measured.md")


def read(path: Path) -> tuple[str, list[Row], dict[str, Footprints]]:
    """The machine's line, the rows, and memory and bytes by case."""
    answer = json.loads(path.read_text())
    rows = [Row(**{**row, "ratio": tuple(row["ratio"])}) for row in answer["rows"]]
    return answer["machine"], rows, answer["footprints"]


def ratio(row: Row | None) -> str:
    """The median ratio with its quartiles, and the ratio to torch's schedule where there is one."""
    if row is None:
        return ""
    low, middle, high = row.ratio
    text = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
    if row.to_counterpart is not None:
        text += f"; {row.to_counterpart:.2f}"
    return text


def table(case: str, size: int, rows: Iterable[Row]) -> list[str]:
    """A line for each plan and each peer of one case on so many ranks."""
    found = {row.system: row for row in rows if row.case == case and row.size == size}
    what = CASES[case]
    lines = [f"\n### {what.why}, vocabulary {what.vocab_size}; {size} ranks\n"]
    lines.append(f"| system | {' | '.join(VARIANTS)} |")
    lines.append("|---|---|---|---|")
    for name, row in found.items():
        if name.startswith("torch"):
            lines.append(f"| {name} | {ratio(row)} | | |")
    plans = dict.fromkeys(name.split(" | ")[0] for name in found if " | " in name)
    for plan in plans:
        cells = [ratio(found.get(f"{plan} | {variant}")) for variant in VARIANTS]
        lines.append(f"| `{plan}` | {' | '.join(cells)} |")
    return lines


def footprint_table(case: str, footprints: Footprints) -> list[str]:
    """Memory above `import torch` of the fullest rank, and bytes sent a step."""
    what = FOOTPRINT_CASES[case]
    lines = [f"\n### Memory and bytes, {what.why}, vocabulary {what.vocab_size}; 2 ranks\n"]
    lines += ["| system | peak MB | MB sent a step |", "|---|---|---|"]
    for name, one in footprints.items():
        sent = one["sent_bytes"]
        sent_text = "" if sent is None else f"{sent / 1e6:.2f}"
        lines.append(f"| {name} | {(one['peak_bytes'] or 0) / 1e6:.0f} | {sent_text} |")
    return lines


def section(path: Path, commit: str) -> tuple[str, str]:
    """The title of a processor's section, and its text."""
    machine, rows, footprints = read(path)
    title = machine.split(";")[0].removeprefix("processor: ")
    lines = [f"## {title}\n", f"{machine}; plait at `{commit}`."]
    cells = dict.fromkeys((row.case, row.size) for row in rows)
    for case, size in cells:
        lines += table(case, size, rows)
    for case, found in footprints.items():
        lines += footprint_table(case, found)
    return title, "\n".join(lines) + "\n"


def replaced(page: str, title: str, text: str) -> str:
    """The page with one processor's section replaced, or added at its end."""
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(page):
        return pattern.sub(lambda _: text, page)
    return page.rstrip("\n") + "\n\n" + text


def commit_here() -> str:
    """The short name of the commit of this checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def carry(rows: Path, page: Path, commit: str) -> None:
    """Put the rows of one run into the page."""
    title, text = section(rows, commit)
    page.write_text(replaced(page.read_text(), title, text))
