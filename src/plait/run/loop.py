"""The loop: batches through an engine, hooks beside it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from plait.doctor.flight import Phase
from plait.engine.engine import Engine
from plait.engine.step import StepResult
from plait.run.hooks import BatchWait, Hook, RunStart, StepDone
from plait.run.memory import held_memory_bytes
from plait.run.rollback import Rollback
from plait.values import PyTree


class Batches(Protocol):
    """The loader that `fit` reads: this rank's share of one global batch after the other,
    without end.
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
    """
    for hook in hooks:
        hook.on_start(RunStart(engine, loader, engine.step_index + 1, steps))
    flight = engine.world.recorder.flight
    batches = iter(loader)
    news = News(hooks)
    result: StepResult | None = None
    while True:
        if engine.step_index >= steps or ends_before(engine.step_index):
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
            news.hear(engine, result)
            seconds = time.perf_counter() - began
            learning_rate = None if rate is None else rate(engine.step_index - 1)
            memory = held_memory_bytes(engine.world.device)
            news.add(StepDone(engine.step_index, seconds, result, learning_rate, memory, wait))
        if rollback is not None and engine.guard.rolls_back:
            news.forget()
            _go_back(rollback, hooks)
            batches = iter(loader)
        else:
            news.tell()
    news.tell()
    flight.enter(Phase.ENDING)
    engine.flush()
    engine.driver.synchronize()
    for hook in hooks:
        hook.on_end()
    return result


def _go_back(rollback: Rollback, hooks: Sequence[Hook]) -> None:
    """Load the state that was kept last. Collective."""
    for hook in hooks:
        hook.before_rollback()
    step = rollback.go_back()
    for hook in hooks:
        hook.on_rollback(step)


class News:
    """Steps that hooks have not been told of: at most two, of which the host may not have heard."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = hooks
        self._done: deque[StepDone] = deque()

    def hear(self, engine: Engine, result: StepResult) -> None:
        """Have the host hear of a step now, where a hook looks at the state after it."""
        is_told = result.outcome.is_told
        if not is_told and any(hook.needs_state(engine.step_index) for hook in self._hooks):
            engine.settle()

    def add(self, done: StepDone) -> None:
        """A step is made."""
        self._done.append(done)

    def settle(self, engine: Engine) -> None:
        """Have the host hear of all steps. Collective."""
        if not all(done.result.outcome.is_told for done in self._done):
            engine.settle()

    def tell(self) -> None:
        """Tell all hooks of the steps that the host has heard of."""
        while self._done and self._done[0].result.outcome.is_told:
            done = self._done.popleft()
            for hook in self._hooks:
                hook.on_step(done)

    def forget(self) -> None:
        """An earlier state was loaded: the steps since are done again."""
        self._done.clear()
