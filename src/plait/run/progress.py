"""Progress for people: a bar on a terminal, a plain line every so often elsewhere. Always on
stderr, from one rank only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

from plait.run.counted import batch_of, counted_unit
from plait.run.hooks import Hook, RunStart, StepDone
from plait.run.memory import peak_memory_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 2.0


def progress(stream: TextIO) -> Hook:
    """The hook that suits the stream."""
    return ProgressBar(stream) if stream.isatty() else Lines(stream)


class Pace:
    """Tokens or samples a second and the time left, from the steps so far. The first, which warms
    up, counts only when alone.
    """

    def __init__(self, num_steps: int, global_batch: int = 0) -> None:
        self.num_steps = num_steps
        self.global_batch = global_batch
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def add(self, done: StepDone) -> None:
        """Take in one step."""
        self.seconds.append(done.seconds)
        self.tokens.append(int(done.result.tokens))

    @property
    def step_seconds(self) -> float:
        """The mean of the last ten steps."""
        recent = self.seconds[1:][-10:] or self.seconds
        return sum(recent) / len(recent)

    def text(self) -> str:
        """`51,200 tokens/s, 0.9 GB, 0:12 left`."""
        rate = self.tokens[-1] / self.step_seconds if self.step_seconds > 0 else 0.0
        unit = counted_unit(self.tokens, self.global_batch)
        left = max(0, round((self.num_steps - len(self.seconds)) * self.step_seconds))
        clock = (
            f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
            if left >= 3600
            else f"{left // 60}:{left % 60:02d}"
        )
        return f"{rate:,.0f} {unit}/s, {peak_memory_bytes() / 1e9:.2f} GB, {clock} left"


def _told(done: StepDone, pace: Pace) -> str:
    load = "" if done.result.load is None else f"  {done.result.load.text()}"
    return f"loss {done.result.loss:.4f}  {pace.text()}{load}"


class Lines(Hook):
    """One line at the first and the last step, and between them when `every_seconds` have
    passed.
    """

    def __init__(self, stream: TextIO, every_seconds: float = LINE_SECONDS) -> None:
        self.stream = stream
        self.every_seconds = every_seconds
        self._printed_at = -float("inf")

    def on_start(self, start: RunStart) -> None:
        """Learn how many steps there are."""
        self._last = start.last_step
        self._pace = Pace(start.last_step - start.first_step + 1, batch_of(start))

    def needs_state(self, step: int) -> bool:
        return False

    def on_step(self, done: StepDone) -> None:
        """Print when it is time to."""
        self._pace.add(done)
        now = time.monotonic()
        if done.step < self._last and now - self._printed_at < self.every_seconds:
            return
        self._printed_at = now
        line = f"step {done.step}/{self._last}  {_told(done, self._pace)}"
        print(line, file=self.stream, flush=True)


class EvaluatedLines:
    """A line of an evaluation that goes on, when some seconds have passed since the last.

    `remark` ends the first one.
    """

    def __init__(
        self,
        num_samples: int,
        stream: TextIO,
        every_seconds: float = LINE_SECONDS,
        *,
        remark: str = "",
    ) -> None:
        self._num_samples = num_samples
        self._stream = stream
        self._every_seconds = every_seconds
        self._remark = remark
        self._printed_at = time.monotonic()

    def __call__(self, num_done: int, loss: float) -> None:
        """Print when it is time to."""
        now = time.monotonic()
        if now - self._printed_at < self._every_seconds:
            return
        self._printed_at = now
        line = f"evaluated {num_done:,} of {self._num_samples:,} samples, loss so far {loss:.4f}"
        print(line + self._remark, file=self._stream, flush=True)
        self._remark = ""


class ProgressBar(Hook):
    """A bar with loss, tokens or samples a second, memory and time left."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def on_start(self, start: RunStart) -> None:
        """Draw the empty bar."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
        )
        self._bar = Progress(
            *columns,
            console=Console(file=self.stream),
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(
            "train", total=start.last_step, completed=start.first_step - 1, told=""
        )
        self._pace = Pace(start.last_step - start.first_step + 1, batch_of(start))
        self._bar.start()

    def needs_state(self, step: int) -> bool:
        return False

    def on_step(self, done: StepDone) -> None:
        """Move it on."""
        assert self._bar is not None and self._task is not None  # on_start came first
        self._pace.add(done)
        self._bar.update(self._task, completed=done.step, told=_told(done, self._pace))

    def on_end(self) -> None:
        """Leave it standing, and the cursor visible."""
        if self._bar is not None:
            self._bar.stop()
