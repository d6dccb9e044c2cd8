"""A process of its own for a model or a part: it gets ready, waits for its turn, and measures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.gpu.record import Record, say

CHILD = "from benchmarks.gpu.child import main; main()"


class Child:
    """The process of one part. What it prints is printed here, and its errors go to a log."""

    def __init__(self, name: str, device: str, folder: Path) -> None:
        self.name = name
        self.part = name.partition("-")[0]
        self._device = device
        self._folder = folder
        self._ready = folder / f".ready-{name}"
        self._ready.unlink(missing_ok=True)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Let it import, build and compile; it measures nothing yet."""
        if self._process is not None:
            return
        with (self._folder / f"log-{self.name}.txt").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CHILD, self.name, self._device, str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"},
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Whether it waits for its turn, or has ended."""
        ended = self._process is not None and self._process.poll() is not None
        return ended or self._ready.exists()

    def measure(self, own: float, seconds: float) -> None:
        """Let it measure for its own seconds, print its lines, and stop it where it takes all."""
        process = self._process
        assert process is not None and process.stdin is not None
        reader = threading.Thread(target=self._relay, daemon=True)
        reader.start()
        with contextlib.suppress(OSError):
            process.stdin.write(f"{time.time() + own}\n")
            process.stdin.flush()
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._wrong(f"took longer than the {seconds:.0f} s that were left")
        else:
            if code:
                self._wrong(f"ended with code {code}: {self._last_line()}")
        self.end()
        reader.join(2.0)

    def end(self) -> None:
        """End it and all that it started."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._ready.unlink(missing_ok=True)

    def _relay(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            say(line.rstrip("\n"))

    def _wrong(self, what: str) -> None:
        say(f"FAILED {self.name}: {what}")
        Record(self._folder, self.name).keep(failed=self.name, error=what)

    def _last_line(self) -> str:
        text = (self._folder / f"log-{self.name}.txt").read_text(errors="replace")
        return (text.strip().splitlines() or ["no message"])[-1][:300]
