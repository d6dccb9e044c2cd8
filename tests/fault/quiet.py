"""False alarms: healthy runs beside a busy machine, and how often the doctor speaks.

    python -m tests.fault.quiet [--steps 10000] [--plans TEXT ...] [--load N] [--seconds S]

The steps are cheap, and shared among the plans. `--load` keeps so many processes computing beside
them. Every finding is a false alarm, and is printed. `--seconds` begins no plan after so long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault.planted import CONFIG, ROOT

PLANS = ("dp2", "dp2:zero1", "dp2:zero3", "tp2", "pp2:1f1b mb4")
BURN = "while True: pass"


@dataclass(frozen=True)
class Healthy:
    """One run without a fault: the steps that it did, what was found, and how it ended."""

    plan: str
    steps: int
    seconds: float
    findings: list[dict[str, Any]]
    code: int
    err: str


def watched(plan: str, steps: int, folder: Path) -> Healthy:
    """A run of a plan under the doctor's eyes, with `hang_seconds` of 5."""
    text = CONFIG.replace("steps = 100000", f"steps = {steps}")
    (folder / "quiet.toml").write_text(text)
    variables = {key: value for key, value in os.environ.items() if key != "PLANTED"}
    paths = [str(ROOT), str(ROOT / "src"), variables.get("PYTHONPATH", "")]
    variables.update(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "plait", "train", "quiet.toml", "--plan", plan, "--out", "run"]
    began = time.monotonic()
    run = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - began
    done = lines_of(folder / "run" / "metrics.jsonl")
    found = [json.loads(line) for line in lines_of(folder / "run" / "doctor" / "findings.jsonl")]
    return Healthy(plan, len(done), seconds, found, run.returncode, run.stderr)


def lines_of(path: Path) -> list[str]:
    """The lines of a file; none where there is no file."""
    return path.read_text().splitlines() if path.exists() else []


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for one in burning:
            one.kill()
            one.wait()


def main() -> int:
    """Run the plans one after the other, and count what the doctor said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="of all plans together")
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--load", type=int, default=0, help="processes that compute beside")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after so long")
    words = parser.parse_args()
    end = time.monotonic() + words.seconds
    share = -(-words.steps // len(words.plans))
    steps = alarms = failed = 0
    with load(words.load):
        for plan in words.plans:
            if time.monotonic() > end:
                print(f"out of time; go on with --plans '{plan}' ...")
                break
            with tempfile.TemporaryDirectory() as folder:
                run = watched(plan, share, Path(folder))
            steps += run.steps
            alarms += len(run.findings)
            failed += run.code != 0
            load_average = os.getloadavg()[0]
            print(
                f"{plan:16} {run.steps:6} steps in {run.seconds:6.1f} s, exit code {run.code}, "
                f"{len(run.findings)} findings, load {load_average:.1f}",
                flush=True,
            )
            for finding in run.findings:
                print(f"    {json.dumps(finding)[:600]}", flush=True)
            if run.code:
                print(run.err[-1500:], flush=True)
    print(f"{alarms} false alarms in {steps} steps")
    return int(alarms > 0 or failed > 0)


if __name__ == "__main__":
    sys.exit(main())
