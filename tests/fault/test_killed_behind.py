"""Ranks are killed with SIGKILL while they save behind the run's back, at moments of a seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 300


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kills"), [(0, 10), pytest.param(1, 100, marks=pytest.mark.long)])
def test_each_checkpoint_is_whole_or_swept(seed: int, kills: int, tmp_path: Path) -> None:
    """A checkpoint with its name can be read to its last byte. The next save finds no other."""
    words = ("--seed", f"{seed}", "--kills", f"{kills}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fault.killed_behind", str(tmp_path), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == kills
    assert sum(bool(one["left"]) for one in told) > kills / 2, "they die in a save"
