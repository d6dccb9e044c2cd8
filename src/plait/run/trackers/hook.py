"""The hook that sends numbers to trackers; one that fails is left out, and the run goes on."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from plait.errors import ConfigError
from plait.run.hooks import Hook, RunStart, StepDone
from plait.run.trackers.mlflow import MLflow
from plait.run.trackers.tensorboard import TensorBoard
from plait.run.trackers.tracker import TrackedRun, Tracker
from plait.run.trackers.wandb import WandB
from plait.values import JsonMapping

T = TypeVar("T")
TRACKERS: Final[dict[str, tuple[str, Callable[[TrackedRun], Tracker]]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
}
"""The package and the maker of each name of `[log] to`."""


def check_packages(names: Iterable[str]) -> None:
    """Errors: `ConfigError` naming the first package of `[log] to` that is not installed."""
    for name in names:
        package, _ = TRACKERS[name]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"log.to names {name}, and the package {package} is not installed: "
                f"pip install 'plait[{name}]'"
            )


class Trackers(Hook):
    """Tells every tracker the metrics of each step and each evaluation. On rank 0 alone."""

    def __init__(
        self,
        names: Iterable[str],
        folder: Path,
        config: JsonMapping,
        plan: str,
        evaluation: Callable[[], tuple[int, JsonMapping] | None] = lambda: None,
    ) -> None:
        self._names = tuple(names)
        self._folder = folder
        self._config = config
        self._plan = plan
        self._evaluation = evaluation
        self._sent_step: int | None = None
        self._trackers: dict[str, Tracker] = {}

    def on_start(self, start: RunStart) -> None:
        """Open each tracker, and tell an evaluation that was made up for before the first step."""
        run = TrackedRun(self._folder, self._config, self._plan, start.first_step)
        for name in self._names:
            _, make = TRACKERS[name]
            tracker = _guarded(name, partial(make, run))
            if tracker is not None:
                self._trackers[name] = tracker
        self._send_evaluation()

    def needs_state(self, step: int) -> bool:
        return False

    def on_step(self, done: StepDone) -> None:
        """Tell the numbers of the step."""
        result = done.result
        metrics = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/learning_rate": done.learning_rate,
            "train/memory_bytes": done.memory_bytes,
            "train/tokens": result.tokens,
            "train/step_seconds": done.seconds,
            "train/tokens_per_second": result.tokens / done.seconds if done.seconds else None,
        }
        self._send(metrics, done.step)
        self._send_evaluation()

    def on_rollback(self, step: int) -> None:
        """Have each tracker take the steps that are done again once."""
        if self._sent_step is not None and self._sent_step > step:
            self._sent_step = None
        for name, tracker in list(self._trackers.items()):
            if not _guarded(name, partial(_gone_back, tracker, step)):
                del self._trackers[name]

    def on_end(self) -> None:
        """Tell the last evaluation."""
        self._send_evaluation()

    def finish(self, report: Path | None) -> None:
        """Close each tracker; `report` is the page of the run."""
        for name, tracker in list(self._trackers.items()):
            _guarded(name, partial(tracker.finish, report))
        self._trackers.clear()

    def _send_evaluation(self) -> None:
        newest = self._evaluation()
        if newest is None or newest[0] == self._sent_step:
            return
        self._sent_step, values = newest
        self._send({f"eval/{name}": value for name, value in values.items()}, self._sent_step)

    def _send(self, metrics: JsonMapping, step: int) -> None:
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        for name, tracker in list(self._trackers.items()):
            if not _guarded(name, partial(_logged, tracker, numbers, step)):
                del self._trackers[name]


def _logged(tracker: Tracker, numbers: Mapping[str, float], step: int) -> bool:
    tracker.log(numbers, step)
    return True


def _gone_back(tracker: Tracker, step: int) -> bool:
    tracker.go_back(step)
    return True


def _guarded(name: str, act: Callable[[], T]) -> T | None:
    """The result of a tracker's call; None after a failure, which is printed on stderr."""
    try:
        return act()
    except Exception as error:  # whatever a package raises, the training is worth more
        print(
            f"warning: {name} failed and is left out: {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )
        return None
