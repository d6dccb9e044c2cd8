"""Every example in its small setting: each holds its own reference and fails where it does not meet
it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = ("finetune", "language", "moe", "simulation", "vision")


@pytest.mark.parametrize("name", EXAMPLES)
def test_meets_its_reference(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--small", "--out", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest difference" in done.stdout
    pictures = list(tmp_path.glob("*.svg"))
    assert pictures and "<polyline" in pictures[0].read_text()


def test_the_checker_of_another_framework_names_what_is_wrong() -> None:
    """The one example that trains nothing."""
    command = [sys.executable, str(FOLDER / "check_torch_pipelining.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("== ") == 3


def test_every_example_runs_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        *EXAMPLES,
        "common",
        "check_torch_pipelining",
    }
