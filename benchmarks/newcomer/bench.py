"""Time the commands of `docs/start.md`: `python -m benchmarks.newcomer.bench [--installed]`.

A new folder, a new environment in it, and each command once. The cache of pip is as it is: run
twice for a warm one. `--installed` leaves the install out and takes this Python's plait.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import announce

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "start.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)


def commands() -> list[str]:
    """The lines of the guide's console blocks."""
    found = []
    for language, title, text in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        if language == "console" and not title:
            found += text.splitlines()
    return found


def write_files(folder: Path) -> None:
    """The files that the guide shows."""
    for _, title, text in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        if title:
            (folder / title).write_text(text, encoding="utf-8")


def timed(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Seconds of a command, which must succeed."""
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return time.perf_counter() - start


def install(folder: Path) -> list[tuple[str, float]]:
    """An environment with plait in it, and how long that took."""
    python = folder / ".venv" / "bin" / "python"
    made = timed([sys.executable, "-m", "venv", str(folder / ".venv")], folder, dict(os.environ))
    constraints = str(ROOT / "constraints.txt")
    words = [str(python), "-m", "pip", "install", "-q", "-c", constraints, str(ROOT)]
    return [("install", made + timed(words, folder, dict(os.environ)))]


def main() -> None:
    """Run the guide, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--installed", action="store_true")
    arguments = parser.parse_args()
    announce()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = [] if arguments.installed else install(folder)
        python = sys.executable if arguments.installed else str(folder / ".venv/bin/python")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if arguments.installed:
            environment["PYTHONPATH"] = str(ROOT / "src")
        write_files(folder)
        for line in commands():
            words = line.replace("plait ", f"{python} -m plait ", 1)
            rows.append((f"`{line}`", timed(["sh", "-c", words], folder, environment)))
    print("| command | seconds |\n|---|---|")
    for name, seconds in rows:
        print(f"| {name} | {seconds:.1f} |")
    print(f"| all | {sum(seconds for _, seconds in rows):.1f} |")


if __name__ == "__main__":
    main()
