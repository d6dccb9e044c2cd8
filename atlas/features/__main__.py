"""`python -m atlas.features [GROUP ...] [--write]`: judge each feature; write the table.

A feature that is refused by its framework, or that fails, has its error for an answer. Groups of
packages that are not installed are left out; their tables stay as they are.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from atlas.features.walk import Row, features_of, walked

PAGE = Path(__file__).parent / "README.md"
GROUPS = {
    "ddp": "torch",
    "fsdp2": "torch",
    "tensor": "torch",
    "pipelines": "torch",
    "hugging_face": "accelerate",
    "fabric": "lightning",
    "zero": "deepspeed",
}
"""Each group with the package that it needs."""
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


def merged(page: str, sections: dict[str, str]) -> str:
    """The page with new sections; each group's own begins with a line that names the group."""
    kept = re.findall(r"<!-- (\w+) -->\n(.*?)(?=<!-- |\Z)", page, re.DOTALL)
    known = dict(kept) | sections
    parts = [f"<!-- {group} -->\n{known[group].strip()}\n" for group in GROUPS if group in known]
    return HEAD + "\n".join(parts)


def is_expected(words: str, answer: str) -> bool:
    """Whether the answer has the words; "equal" is the whole answer."""
    return answer == words if words == "equal" else words in answer


def main() -> int:
    """0 where every answer is the expected one."""
    parser = argparse.ArgumentParser(prog="python -m atlas.features")
    parser.add_argument("groups", nargs="*", default=GROUPS, metavar="GROUP")
    parser.add_argument("--words", default="", help="features whose names have these words")
    parser.add_argument("--write", action="store_true", help="write the README of this folder")
    arguments = parser.parse_args()
    unexpected = 0
    sections = {}
    for group in arguments.groups:
        if importlib.util.find_spec(GROUPS[group]) is None:
            print(f"{group}: not installed: pip install {GROUPS[group]}", flush=True)
            continue
        rows = walked(group, arguments.words)
        expected = {one.name: one.expected for one in features_of(group)}
        odd = [row for row in rows if not is_expected(expected[row[0]], row[1])]
        for name, answer in odd:
            print(f"not expected of {group}, {name}: {answer}", flush=True)
        unexpected += len(odd)
        sections[group] = section(group, rows)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(merged(page, sections), encoding="utf-8")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
