"""`python -m benchmarks.census [--families ...] [--tasks ...] [--plans ...] [--write]`.

One process judges forty classes, since each leaves some 100 MB of code and traces. One that is
silent for a minute, or dies, costs its class a sentence and is started again. The last lines count
what the source says about single families.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.census import specific
from benchmarks.census.configs import TASKS, classes
from benchmarks.census.table import PLANS, rows_of, summary, write
from benchmarks.census.worker import MARK
from benchmarks.machine import announce

SILENCE_SECONDS = 60.0
CLASSES_A_PROCESS = 40


class Worker:
    """The process that judges, and its next one where it dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._num_classes = 0

    def ask(self, task: str, family: str, plans: list[str]) -> Iterator[dict[str, Any]]:
        """The cells of a class; those left out by a crash or a hang say so."""
        left = list(plans)
        self._num_classes += 1
        if self._num_classes % CLASSES_A_PROCESS == 0:
            self.end()
        while left:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(f"{task} {family} {'|'.join(left)}\n".encode())
            process.stdin.flush()
            while cell := self._next():
                yield cell
                left = [plan for plan in left if plan != cell["plan"]] if cell["plan"] else []
            if cell is not None:
                return
            why = self.end()
            yield {"task": task, "family": family, "plan": left.pop(0), "verdict": "crashed"} | {
                "reason": why,
                "seconds": SILENCE_SECONDS,
            }

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            words = [sys.executable, "-c", "from benchmarks.census.worker import serve; serve()"]
            pipe = subprocess.PIPE
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            self._process = subprocess.Popen(
                words,
                bufsize=0,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        return self._process

    def _next(self) -> dict[str, Any] | None:
        """The next cell, empty behind the last; None where the process is silent or has ended."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            while waiting.select(SILENCE_SECONDS):
                line = self._process.stdout.readline().decode()
                if not line:
                    return None
                if line.startswith(MARK):
                    cell: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return cell
        return None

    def end(self) -> str:
        """Stop the process; how it ended."""
        if self._process is None:
            return ""
        code = self._process.poll()
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process = None
        silent = f"the process was silent for {SILENCE_SECONDS:.0f} s"
        return silent if code is None else f"the process ended with {code}"


def main() -> int:
    """Judge, print each cell that is not equal, and the shares of those that are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.census")
    parser.add_argument("--families", nargs="+", help="model types; by default all")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--plans", nargs="+", default=list(PLANS), help="plans, each one word")
    parser.add_argument("--part", default="1/1", help="the k-th of n parts of the classes: k/n")
    parser.add_argument("--cells", type=Path, help="a file to which every cell is added as JSON")
    parser.add_argument("--write", type=Path, help="write the table of these cells' file")
    arguments = parser.parse_args()
    if arguments.write is not None:
        cells = [json.loads(line) for line in arguments.cells.read_text().splitlines()]
        write(arguments.write, cells)
        return 0
    announce()
    index, count = map(int, arguments.part.split("/"))
    wanted = [
        (task, family)
        for task, family in classes()
        if task in arguments.tasks and family in (arguments.families or [family])
    ]
    worker = Worker()
    cells = []
    try:
        for task, family in wanted[index - 1 :: count]:
            for cell in worker.ask(task, family, arguments.plans):
                cells.append(cell)
                _tell(cell, arguments.cells)
    finally:
        worker.end()
    print("\n".join([*summary(rows_of(cells)), *specific.lines()]))
    return int(any(cell["verdict"] == "wrong" for cell in cells))


def _tell(cell: dict[str, Any], path: Path | None) -> None:
    what = f"{cell['task']:8} {cell['family']:24} {cell['plan']:28} {cell['verdict']:8}"
    print(f"{what} {cell['seconds']:5.1f}s {cell['reason'][:240]}", flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(cell) + "\n")


if __name__ == "__main__":
    sys.exit(main())
