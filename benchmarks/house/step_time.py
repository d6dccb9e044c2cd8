"""Is a step as fast as it was at another commit? Both run `plait train` by turns.

    python -m benchmarks.house.step_time OLD [--turns 6] [--plans dp1 dp2:zero3 "pp2:1f1b mb8"]

The model is a GPT with 8 layers of width 256, on 16 samples of 128 tokens. A turn trains each plan
from a work tree of the old commit and from this checkout. The order changes with every turn, so
that a drift of the machine meets both. The ratio of a turn is that of the median steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.machine import announce
from benchmarks.page.commits import ROOT, checked_out, removed
from benchmarks.spread import quartiles

PLANS = ("dp1", "dp2:zero3", "pp2:1f1b mb8")
UNCOUNTED = 3
"""Steps at the start of a run, in which memory is taken for the first time."""
CONFIG = """
[model]
name = "gpt"
num_hidden_layers = 8
hidden_size = 256
num_attention_heads = 8
intermediate_size = 1024
vocab_size = 1024
[data]
name = "random"
seq_len = 128
[train]
steps = 14
global_batch = 16
lr = 1e-3
"""


def median_step(tree: Path, plan: str, folder: Path) -> float:
    """Train a few steps with the library of a tree.

    Returns:
        The median step in seconds.
    """
    config = folder / "config.toml"
    config.write_text(CONFIG)
    with tempfile.TemporaryDirectory(dir=folder) as parent:
        out = Path(parent, "run")
        words = ["train", str(config), "--plan", plan, "--out", str(out)]
        subprocess.run(
            [sys.executable, "-m", "plait", *words],
            check=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
        )
        lines = (out / "metrics.jsonl").read_text().splitlines()
    return median(json.loads(line)["seconds"] for line in lines[UNCOUNTED:])


def compare(old: str, turns: int, plans: Sequence[str]) -> None:
    """Print a line for each plan: new over old, the median of the turns and its quartiles."""
    ratios: dict[str, list[float]] = {plan: [] for plan in plans}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        tree = checked_out(old, folder / "old")
        try:
            for turn in range(turns):
                order = (tree, ROOT) if turn % 2 == 0 else (ROOT, tree)
                for plan in plans:
                    seconds = {at: median_step(at, plan, folder) for at in order}
                    ratios[plan].append(seconds[ROOT] / seconds[tree])
        finally:
            removed(tree)
    print(f"| plan | new over old {old}, median of {turns} turns | quartiles |\n|---|---|---|")
    for plan, found in ratios.items():
        low, middle, high = quartiles(found)
        print(f"| `{plan}` | {middle:.3f} | {low:.3f} to {high:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD", help="a commit")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    arguments = parser.parse_args()
    announce()
    compare(arguments.old, arguments.turns, arguments.plans)


if __name__ == "__main__":
    main()
