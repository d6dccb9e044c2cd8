"""The line that a process is at can be asked for while all of its threads run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from plait.doctor import process
from plait.doctor.lines import stack_of

QUESTIONS = 100
PROGRAM = """
import sys, threading
from pathlib import Path
from plait.doctor.lines import answer_signals

def descend(depth):
    return depth and descend(depth - 1)

def run_for_ever():
    while True:
        eval("descend(40)", {"descend": descend})

answer_signals(Path(sys.argv[1]), 0)
sys.setswitchinterval(1e-5)
for _ in range(4):
    threading.Thread(target=run_for_ever, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


@dataclass(frozen=True)
class Rank:
    """The part of a snapshot that the question needs."""

    pid: int
    rank: int = 0

    def process_state(self) -> str:
        return process.state(self.pid)


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose main thread waits, and whose others call and return."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        yield program
        program.kill()


def test_a_stopped_process_tells_where_its_main_thread_is(
    busy: subprocess.Popen[str], tmp_path: Path
) -> None:
    for _ in range(QUESTIONS):
        busy.send_signal(signal.SIGSTOP)  # the next signal then goes to any of the threads
        while process.state(busy.pid) != "T":
            time.sleep(0.001)
        stack = stack_of(tmp_path, Rank(busy.pid))  # type: ignore[arg-type]
        assert stack[-1].endswith("in <module>")  # the main thread
    assert busy.poll() is None
