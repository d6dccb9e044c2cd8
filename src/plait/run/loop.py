"""The loop: batches through an engine, hooks beside it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from plait.doctor.flight import Phase
from plait.engine.engine import Engine
from plait.engine.step import StepResult
from plait.errors import DataError, PlaitError
from plait.run.hooks import BatchWait, Hook, RunStart, StepDone
from plait.run.memory import held_memory_bytes
from plait.run.rollback import Rollback
from plait.values import PyTree


class Batches(Protocol):
    """The loader that `fit` reads: this rank's share of one global batch after the other.

    One that ends, as torch's `DataLoader` does after an epoch, is read again from its start.
    """

    def __iter__(self) -> Iterator[PyTree]: ...


def fit(
    engine: Engine,
    loader: Batches,
    steps: int,
    hooks: Sequence[Hook] = (),
    ends_before: Callable[[int], bool] = lambda step: False,
    *,
    rollback: Rollback | None = None,
    rate: Callable[[int], float] | None = None,
) -> StepResult | None:
    """Train until the engine has done `steps` steps in all. Collective.

    An engine that was loaded from a checkpoint continues after the step that was saved.

    Args:
        engine: this rank's engine.
        loader: this rank's share of one global batch after the other: tensors (samples here, ...).
        steps: of the whole training, those before a checkpoint included.
        hooks: called at the start, after each step and at the end.
        ends_before: whether training ends after so many steps; alike on every rank.
        rollback: needed with `on_nan = "back"`, and one of the hooks.
        rate: the learning rate by step, from 0, for the hooks.

    Returns:
        The result of the last step; None where there was none to do.

    Raises:
        DataError: the loader ended, and gives nothing when it is read again.
    """
    for hook in hooks:
        hook.on_start(RunStart(engine, loader, engine.step_index + 1, steps))
    flight = engine.world.recorder.flight
    batches = _endless(loader, engine, steps)
    news = News(hooks, engine)
    result: StepResult | None = None
    while True:
        if engine.step_index >= steps or news.ends(engine, ends_before):
            news.settle(engine)
            if rollback is None or not engine.guard.rolls_back:
                break
        else:
            began = time.perf_counter()
            flight.enter(Phase.LOADING)
            was_ready = bool(getattr(loader, "is_ready", False))
            batch = next(batches)
            wait = BatchWait(began, time.perf_counter() - began, was_ready)
            result = engine.step(batch)
            seconds = time.perf_counter() - began
            learning_rate = None if rate is None else rate(engine.step_index - 1)
            memory = held_memory_bytes(engine.world.device)
            news.add(StepDone(engine.step_index, seconds, result, learning_rate, memory, wait))
            news.settle_newest(engine)
        if rollback is not None and engine.guard.rolls_back:
            news.forget()
            _go_back(rollback, hooks)
            batches = _endless(loader, engine, steps)
        else:
            news.tell()
    news.tell()
    flight.enter(Phase.ENDING)
    engine.flush()
    engine.driver.synchronize()
    for hook in hooks:
        hook.on_end()
    return result


def _endless(loader: Batches, engine: Engine, steps: int) -> Iterator[PyTree]:
    """The batches of a loader, epoch after epoch; `engine` and `steps` are for the error alone."""
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise DataError(
                f"the loader, a {type(loader).__name__}, has no batch left after step "
                f"{engine.step_index} of {steps}; give one that can be read again, as a "
                "DataLoader, or fewer steps"
            )


def _go_back(rollback: Rollback, hooks: Sequence[Hook]) -> None:
    """Load the state that was kept last. Collective."""
    for hook in hooks:
        hook.before_rollback()
    step = rollback.go_back()
    for hook in hooks:
        hook.on_rollback(step)


class News:
    """Steps that hooks have not been told of: at most two, which the host may not have read.

    The seconds of a step last from the reading of the one before until its own.
    """

    def __init__(self, hooks: Sequence[Hook], engine: Engine) -> None:
        """Learn whether a hook of any rank must be told at once. Collective where steps are
        deferred.
        """
        self._hooks = hooks
        self._done: deque[StepDone] = deque()
        self._seconds = 0.0
        own = any(type(hook).needs_state is Hook.needs_state for hook in hooks)
        self._at_once = not engine.is_cut
        if engine.may_defer:
            self._at_once = any(engine.world.axis("world").gather_objects(own))

    def add(self, done: StepDone) -> None:
        """A step is made, in the seconds that `done` has."""
        self._done.append(done)
        self._seconds += done.seconds

    def settle_newest(self, engine: Engine) -> None:
        """Have the host read the newest step, where a hook looks at the state after it."""
        newest = self._done[-1]
        if newest.result.outcome.is_told or engine.guard.rolls_back:
            return
        if self._at_once or any(hook.needs_state(newest.step) for hook in self._hooks):
            self.tell()
            self.settle(engine)

    def ends(self, engine: Engine, ends_before: Callable[[int], bool]) -> bool:
        """Whether training ends before the next step. Hooks learn of all steps where that raises an
        error.
        """
        try:
            return ends_before(engine.step_index)
        except PlaitError:
            self.settle(engine)
            self.tell()
            raise

    def settle(self, engine: Engine) -> None:
        """Have the host read all steps. Collective."""
        if self._done and not self._done[-1].result.outcome.is_told:
            began = time.perf_counter()
            engine.settle()
            self._seconds += time.perf_counter() - began

    def tell(self) -> None:
        """Tell all hooks of the steps that the host has read; several share the seconds."""
        known: list[StepDone] = []
        while self._done and self._done[0].result.outcome.is_told:
            known.append(self._done.popleft())
        if not known:
            return
        each, self._seconds = self._seconds / len(known), 0.0
        for done in known:
            for hook in self._hooks:
                hook.on_step(replace(done, seconds=each))

    def forget(self) -> None:
        """An earlier state was loaded: the steps since are done again."""
        self._done.clear()
        self._seconds = 0.0
