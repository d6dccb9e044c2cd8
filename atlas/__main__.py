"""`python -m atlas [NAME ...] [--write]`: judge the entries, and write their table to the docs."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from atlas.entries import ROOT, Entry, Verdict, entries, verdict
from plait.errors import ConfigError, PlaitError
from plait.toml import read_toml
from plait.verify.outside.trial import check

PAGE = ROOT.parent / "docs" / "atlas.md"
HEAD = """# An atlas of silent errors

Public errors of other people's frameworks that gave no error message, each as the smallest step
that shows it on a CPU, with what `plait verify --step` says about it. Written by
`python -m atlas --write`. Every entry has a control, the step put right, on which verify is silent.
"Real" means that the faulty code is that of a package at the version given, "own words" that the
faulty lines were written anew with their structure. The seconds are those of both steps on two
cores, ranks started anew. Packages of other versions than the installed ones lie in folders of
their own, without what they depend on: `python -m atlas` prints the command for each that it
misses, and reads the folder `PLAIT_ATLAS_PACKAGES` (by default `build/atlas`).

{counts}

| framework | report | what users saw | what plait says | code | seconds |
|---|---|---|---|---|---|
"""
LEADS = """
## Not in the atlas

Public reports that were looked at and are no entry, with the reason.

| framework | report | reason |
|---|---|---|
"""


def link(url: str) -> str:
    """A link whose text is the report's number."""
    return f"[{url.rsplit('/', 1)[1]}]({url})"


def row(found: Verdict, seconds: float) -> str:
    """The line of the table."""
    entry = found.entry
    code = f"real ({entry.version})" if entry.package else "own words"
    said = found.says.replace("|", "/")
    return " | ".join(
        [f"| {entry.framework}", link(entry.link), entry.saw, said, code, f"{seconds:.0f} |"]
    )


def judged(entry: Entry) -> tuple[Verdict, float]:
    """The verdict with its seconds; a step that fails is an answer too."""
    begun = time.perf_counter()
    try:
        found = verdict(entry, check)
    except PlaitError as error:
        traceback.print_exc()
        found = Verdict(entry, "", f"a step failed: {error}")
    return found, time.perf_counter() - begun


def write(rows: dict[str, str]) -> None:
    """The page; an entry that was not judged keeps its line."""
    kept = {}
    for line in PAGE.read_text().split(LEADS)[0].splitlines():  # a lead may have an entry's link
        for entry in entries():
            if f"({entry.link})" in line and entry.name not in rows:
                kept[entry.name] = line
    known = [entry for entry in entries() if entry.name in rows or entry.name in kept]
    real = sum(1 for entry in known if entry.package)
    projects = len({entry.framework for entry in known})
    counts = (
        f"{len(known)} entries from {projects} projects: {real} on the real package, "
        f"{len(known) - real} in own words."
    )
    lines = [rows.get(entry.name) or kept[entry.name] for entry in known]
    leads = read_toml(ROOT / "leads.toml", ConfigError)["lead"]
    left = [f"| {one['framework']} | {link(one['link'])} | {one['reason']} |" for one in leads]
    text = HEAD.format(counts=counts) + "\n".join(lines) + "\n" + LEADS + "\n".join(left) + "\n"
    PAGE.write_text(text)


def main() -> int:
    """0 where every error is named and every control is silent."""
    parser = argparse.ArgumentParser(prog="python -m atlas")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write docs/atlas.md")
    arguments = parser.parse_args()
    rows = {}
    failed = 0
    for entry in entries():
        if arguments.names and entry.name not in arguments.names:
            continue
        if entry.missing:
            print(f"{entry.name:<24} not installed: {entry.missing}", flush=True)
            continue
        found, seconds = judged(entry)
        if not found.wrong:
            rows[entry.name] = row(found, seconds)
        failed += bool(found.wrong)
        print(f"{entry.name:<24} {seconds:5.1f} s  {found.wrong or found.says}", flush=True)
    if arguments.write:
        write(rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
