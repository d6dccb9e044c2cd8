"""Has a commit made anything slower? Two commits take turns on this machine.

    python -m benchmarks.page.commits OLD NEW [--turns 3] [--seconds 90] [--ranks 2]

Each turn runs the page of this checkout over the library of one commit, in a work tree of its own.
A commit that lacks a module which this page imports runs its own page, and a line says so.
A ratio to DDP that grows by more than 5 % in the median of its turns is printed, and the exit
code is 1. Turns alternate, so a change of the machine's speed meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.machine import announce

ROOT = Path(__file__).parents[2]
LIMIT = 1.05

Ratios = dict[tuple[str, int, str], list[float]]
"""Ratios to DDP by case, ranks and system, one a turn."""


def checked_out(commit: str, folder: Path) -> Path:
    """A work tree of the commit."""
    command = ["git", "-C", str(ROOT), "worktree", "add", "--detach", str(folder), commit]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def removed(folder: Path) -> None:
    """Take a work tree away again."""
    command = ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def environment(library: Path, page: Path) -> dict[str, str]:
    """The environment in which a page meets the library of a work tree."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(library / "src"), str(page)))}


def page_for(library: Path) -> Path:
    """The checkout whose page runs over a library: this one, or the library's own."""
    command = [sys.executable, "-c", "import benchmarks.__main__"]
    own = environment(library, ROOT)
    tried = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return ROOT
    reason = tried.stderr.strip().splitlines()[-1]
    print(f"{library.name}: its own page runs, as this one does not ({reason})", flush=True)
    return library


def leaves_memory_out(page: Path) -> list[str]:
    """The argument with which a page measures step times alone; an older page has none."""
    knows = "--times-only" in (page / "benchmarks" / "__main__.py").read_text()
    return ["--times-only"] if knows else []


def turn(library: Path, page: Path, sizing: Sequence[str], out: Path) -> Ratios:
    """The ratios of one page over the library of a work tree."""
    command = [sys.executable, "-m", "benchmarks", "--json", str(out), *sizing]
    subprocess.run(
        [*command, *leaves_memory_out(page)],
        check=True,
        cwd=page,
        env=environment(library, page),
        stdout=subprocess.DEVNULL,
    )
    return ratios_of(json.loads(out.read_text()))


def ratios_of(page: Mapping[str, list[dict[str, object]]]) -> Ratios:
    """The median ratio of each row of a page."""
    found: Ratios = {}
    for row in page["rows"]:
        ratio = row["ratio"]
        assert isinstance(ratio, list)
        found[str(row["case"]), int(str(row["size"])), str(row["system"])] = [float(ratio[1])]
    return found


def slower(old: Ratios, new: Ratios) -> list[tuple[tuple[str, int, str], float, float]]:
    """The rows that have grown by more than the limit, with both medians."""
    found = []
    for key in sorted(old.keys() & new.keys()):
        before = median(old[key])
        after = median(new[key])
        if after > LIMIT * before:
            found.append((key, before, after))
    return found


def compare(commits: Sequence[str], turns: int, seconds: float, ranks: Sequence[int]) -> int:
    """Run both, interleaved, and say what became slower."""
    sizing = ["--seconds", str(seconds), "--ranks", *map(str, ranks)]
    taken: dict[str, Ratios] = {name: defaultdict(list) for name in ("old", "new")}
    with tempfile.TemporaryDirectory() as folder:
        trees = {
            name: checked_out(commit, Path(folder, name))
            for name, commit in zip(taken, commits, strict=True)
        }
        try:
            pages = {name: page_for(tree) for name, tree in trees.items()}
            for _ in range(turns):
                for name, tree in trees.items():
                    own = turn(tree, pages[name], sizing, Path(folder, f"{name}.json"))
                    for key, ratios in own.items():
                        taken[name][key] += ratios
        finally:
            for tree in trees.values():
                removed(tree)
    found = slower(taken["old"], taken["new"])
    for (case, size, system), before, after in found:
        change = f"{before:.3f} -> {after:.3f} ({after / before - 1:+.1%})"
        print(f"slower: {system}, {case}, {size} ranks: {change}")
    if not found:
        print(f"nothing grew by more than {LIMIT - 1:.0%} in {turns} turns of each commit")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs=2, metavar="COMMIT", help="the old one, then the new one")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=90.0, help="of each turn")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    arguments = parser.parse_args()
    announce()
    return compare(arguments.commits, arguments.turns, arguments.seconds, arguments.ranks)


if __name__ == "__main__":
    sys.exit(main())
