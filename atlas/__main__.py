"""`python -m atlas [NAME ...] [--write]`: judge the entries, and write their table to the docs."""

from __future__ import annotations

import argparse
import sys
import time

from atlas.entries import ROOT, Verdict, entries, verdict
from plait.verify.outside.trial import check

PAGE = ROOT.parent / "docs" / "atlas.md"
HEAD = """# An atlas of silent errors

Public errors of other people's frameworks that gave no error message, each as the smallest step
that shows it on a CPU, with what `plait verify --step` says about it. Written by
`python -m atlas --write`. Every entry has a control, the step put right, on which verify is silent.
"Real" means that the faulty code is that of the installed package (torch 2.13), "own words" that
the faulty lines were written anew with their structure. The seconds are those of both steps on two
cores, ranks started anew.

| framework | report | what users saw | what plait says | code | seconds |
|---|---|---|---|---|---|
"""


def row(found: Verdict, seconds: float) -> str:
    """The line of the table."""
    entry = found.entry
    code = f"real ({entry.package})" if entry.package else "own words"
    report = f"[{entry.link.rsplit('/', 1)[1]}]({entry.link})"
    return f"| {entry.framework} | {report} | {entry.saw} | {found.says} | {code} | {seconds:.0f} |"


def main() -> int:
    """0 where every error is named and every control is silent."""
    parser = argparse.ArgumentParser(prog="python -m atlas")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write docs/atlas.md")
    arguments = parser.parse_args()
    rows = []
    failed = 0
    for entry in entries():
        if arguments.names and entry.name not in arguments.names:
            continue
        begun = time.perf_counter()
        found = verdict(entry, check)
        seconds = time.perf_counter() - begun
        rows.append(row(found, seconds))
        failed += bool(found.wrong)
        print(f"{entry.name:<24} {seconds:5.1f} s  {found.wrong or found.says}", flush=True)
    if arguments.write and not failed:
        PAGE.write_text(HEAD + "\n".join(rows) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
