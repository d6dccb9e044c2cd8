"""The newcomer's path: its page has the commands of the guide, and the script times them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from benchmarks.newcomer import bench

from tests.architecture.source import ROOT

ROW = re.compile(r"^\| (?:`(.+)`|(install|all)) \| ([\d.]+) \|$", re.M)
LIMIT_SECONDS = 900  # against hanging, not a measurement
GUIDES = [ROOT / "docs" / "start.md", ROOT / "docs" / "zh" / "start.md"]


def rows(text: str) -> dict[str, float]:
    """Command -> seconds, from a table of the script."""
    return {command or word: float(seconds) for command, word, seconds in ROW.findall(text)}


@pytest.mark.quick
def test_the_page_times_the_commands_of_the_guide() -> None:
    text = (ROOT / "benchmarks" / "newcomer" / "README.md").read_text(encoding="utf-8")
    measured = rows(text)
    assert list(measured) == ["install", *bench.commands(), "all"]
    total = measured.pop("all")
    assert total == pytest.approx(sum(measured.values()), abs=0.1 * len(measured))
    for guide in GUIDES:
        assert rows(guide.read_text(encoding="utf-8")) == {**measured, "all": total}


@pytest.mark.long
def test_the_script_goes_the_whole_path() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.newcomer.bench", "--installed"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(rows(done.stdout)) == [*bench.commands(), "all"]
