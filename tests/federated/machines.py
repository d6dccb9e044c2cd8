"""Scripts as processes of their own, each with its log. When they are closed all are gone, and all
that they have started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fault.processes import children, wait_until_gone

LIMIT_SECONDS = 240.0


class Machines:
    """Scripts that run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: set[int] = set()
        self._path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def start(
        self, name: str, *words: str, path: str = "", rejoin: int = 75
    ) -> subprocess.Popen[bytes]:
        variables = {
            **os.environ,
            "PATH": path + self._path,
            "OMP_NUM_THREADS": "1",
            "PLAIT_REJOIN_SECONDS": str(rejoin),
        }
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words, stdout=log, stderr=log, env=variables, start_new_session=True
            )
        self._running[name] = process
        return process

    def code(self, name: str) -> int | None:
        """How the script has ended: None while it runs."""
        return self._running[name].poll()

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def until(self, condition: Callable[[], Any], *needed: str) -> Any:
        """What the condition gives, once it is true; fails when one of `needed` ends, and after the
        limit.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := condition()):
            ended = [name for name in needed if self._running[name].poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(f"== {name}\n{self.log(name)[-3000:]}" for name in self._running)
                raise AssertionError(
                    f"{f'ended: {ended}' if ended else 'not seen in time'}\n{logs}"
                )
            time.sleep(0.1)
        return found

    def kill(self, name: str) -> None:
        """The script, and all that it has started."""
        process = self._running.pop(name)
        pids = [process.pid, *children(process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        self._pids.update(pids)

    def stop(self, name: str) -> None:
        """Ask the script to end; that it leaves nothing behind is seen when all are closed."""
        process = self._running.pop(name)
        self._pids.update((process.pid, *children(process.pid)))
        process.terminate()
        process.wait(LIMIT_SECONDS)

    def close(self) -> None:
        for name in list(self._running):
            self.kill(name)
        wait_until_gone(self._pids, 30.0)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.close()
