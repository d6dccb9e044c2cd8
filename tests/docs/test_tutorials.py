"""The commands of the guides are run, in their order, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

GUIDES = [
    ROOT / "docs" / "start.md",
    ROOT / "docs" / "which.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
LIMIT_SECONDS = 600  # against hanging, not a measurement
PROGRAMS = {
    "plait": ("-m", "plait"),
    "python": (),
    "torchrun": ("-m", "torch.distributed.run"),
}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_does_what_it_says(guide: Path, tmp_path: Path) -> None:
    num_commands = 0
    for language, title, text in BLOCK.findall(guide.read_text(encoding="utf-8")):
        if title:
            file = tmp_path / title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif language == "console":
            for line in text.splitlines():
                num_commands += run(line, tmp_path)
    assert num_commands > 0


def run(line: str, folder: Path) -> int:
    """Run one line of a console block; a comment `# exit 1` says its exit code."""
    command, _, comment = line.partition("  # exit ")
    program, *words = shlex.split(command)
    if program == "pip":
        return 0  # what a newcomer installs is here already
    done = subprocess.run(
        [sys.executable, *PROGRAMS[program], *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == int(comment or 0), f"{line}\n{done.stdout}\n{done.stderr}"
    return 1
