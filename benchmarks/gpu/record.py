"""What a part found: lines of a table on the screen, and every number in a file."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plait

RUN = "GPU_TABLES_RUN"
"""The variable that tells processes of one call from those of another."""
HOMES = str(Path(plait.__file__).parent), str(Path(__file__).parent)


class Record:
    """Where one part prints and keeps its numbers."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder = folder
        self.part = part

    def keep(self, **numbers: object) -> None:
        """Add one line of JSON to the results."""
        line = {"run": os.environ.get(RUN, ""), "part": self.part, **numbers}
        with (self.folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def kept(self) -> list[dict[str, Any]]:
        """The lines that this call of the script has added, by any of its processes."""
        lines = (self.folder / "results.jsonl").read_text().splitlines()
        return [one for one in map(json.loads, lines) if one["run"] == os.environ.get(RUN, "")]

    def head(self, title: str, columns: Sequence[str]) -> None:
        """Begin a table."""
        say(f"\n{title}\n")
        say(f"| {' | '.join(columns)} |")
        say(f"|{'---|' * len(columns)}")

    def row(self, *cells: object) -> None:
        """Add a line to the table."""
        say(f"| {' | '.join(str(cell) for cell in cells)} |")

    def failed(self, what: str, error: BaseException) -> None:
        """Say in one line what failed and where; the traceback goes to the part's log."""
        traceback.print_exception(error)
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
        own = [one for one in frames if one.filename.startswith(HOMES)]
        if own and own[-1] is not frames[-1]:
            place = f"{own[-1].filename}:{own[-1].lineno} > {place}"
        text = (str(error).strip().splitlines() or [""])[-1][:300]
        say(f"FAILED {self.part} {what}: {type(error).__name__}: {text} ({place})")
        self.keep(failed=what, error=f"{type(error).__name__}: {error}", place=place)


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
