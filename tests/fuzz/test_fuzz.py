"""A sample of hostile inputs, from a process of its own: `python -m tests.fuzz` runs any number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INPUTS = 1008


@pytest.mark.slow
def test_hostile_inputs_get_a_sentence_in_time() -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--inputs", str(INPUTS), "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    table = json.loads(done.stdout)
    assert table["faults"] == []
    assert table["inputs"] == INPUTS
    assert table["internal errors"] == table["over 20 s"] == 0
    assert table["refused"] + table["accepted"] == INPUTS
    assert min(table["refused"], table["accepted"]) > INPUTS // 10  # neither side is hollow
    assert done.returncode == 0
