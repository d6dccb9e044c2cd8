"""Every example in its small setting: each holds its own reference and fails where it does not meet it."""

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
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest difference" in done.stdout
    pictures = list(tmp_path.glob("*.svg"))
    assert pictures and "<polyline" in pictures[0].read_text()
