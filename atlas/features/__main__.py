"""`python -m atlas.features [GROUP ...] [--write]`: judge each feature; write the table.

All features of a group run on ranks that are started once. A feature that is refused by its
framework, or that fails, has its error for an answer.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from pathlib import Path

from atlas.features.walk import Row, features_of, walked

PAGE = Path(__file__).parent / "README.md"
GROUPS = ("ddp", "fsdp2", "tensor", "pipelines")
HEAD = """# Features that were walked

Each feature of a framework is used as its documentation says, on ranks of a CPU, and judged by
`plait verify`. Written by `python -m atlas.features --write`. "Equal" means that loss, gradients
and parameters are those of one device. Errors are the framework's own words.

"""


def section(group: str, rows: list[Row]) -> str:
    """The table of a group."""
    module = importlib.import_module(f"atlas.features.{group}")
    version = importlib.metadata.version(module.PACKAGE).split("+")[0]
    equal = sum(1 for _, answer in rows if answer == "equal")
    lines = [
        f"## {module.TITLE} ({module.PACKAGE} {version})",
        "",
        f"{len(rows)} features, {equal} equal to one device.",
        "",
        "| feature | answer |",
        "|---|---|",
    ]
    for name, answer in rows:
        said = answer.replace("|", "/")
        lines.append(f"| {name} | {said if len(said) <= 160 else said[:157] + '...'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """0 where every answer is the expected one."""
    parser = argparse.ArgumentParser(prog="python -m atlas.features")
    parser.add_argument("groups", nargs="*", default=GROUPS, metavar="GROUP")
    parser.add_argument("--write", action="store_true", help="write the README of this folder")
    arguments = parser.parse_args()
    unexpected = 0
    text = HEAD
    for group in arguments.groups:
        rows = walked(group)
        expected = {one.name: one.expected for one in features_of(group)}
        odd = [row for row in rows if expected[row[0]] not in row[1]]
        for name, answer in odd:
            print(f"not expected of {group}, {name}: {answer}", flush=True)
        unexpected += len(odd)
        text += section(group, rows) + "\n"
    if arguments.write:
        PAGE.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
