"""The first steps of a run, watched: parameters that get no gradient, and weights that do not move.

Neither stops a run. Both are mostly an error of the model or of the loss, so they are said once, by
name. Harmless cases say nothing. Frozen parameters are not watched, and experts without tokens have
siblings that got some. Steps of a warm-up do not count until the rate is large.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from plait.engine.engine import Engine
from plait.errors import some_of
from plait.run.hooks import Hook, RunStart, StepDone

STEPS = 3  # an output layer that starts from 0 holds back the gradients of the first two
SMALLEST_RATE = 0.1  # of the learning rate: smaller ones may well be lost in rounding

Warn = Callable[[str], None]
Mark = tuple[int, float]


class Watch(Hook):
    """Looks at `STEPS` steps, then says what was wrong. For all ranks, which agree at the end.

    `warnings` are what was said, the same on every rank.
    """

    def __init__(self, warn: Warn) -> None:
        self.warnings: list[str] = []
        self._warn = warn
        self._done = True

    def on_start(self, start: RunStart) -> None:
        """Note where the weights are."""
        engine: Engine = start.engine
        self._engine = engine
        self._last = start.last_step
        self._num_steps = 0
        self._num_still = 0
        self._touched: set[str] = set()
        together = engine.driver.is_synchronous and engine.world.membership is None
        self._done = not together or start.first_step > start.last_step
        if not self._done:
            self._before = _marks(engine)

    def needs_state(self, step: int) -> bool:
        return not self._done

    def on_step(self, done: StepDone) -> None:
        """Take in one step. Collective at the last one that is watched."""
        if self._done:
            return
        for state in self._engine.strategy.states:
            self._touched |= {state.bucket.slots[index].name for index in state.touched}
        if self._engine.update.rate(done.step - 1) >= SMALLEST_RATE and not done.result.skipped:
            self._num_steps += 1
            self._num_still += done.result.grad_norm == 0.0
        if self._num_steps == STEPS or done.step == self._last:
            self._done = True
            self._judge()

    def _judge(self) -> None:
        now = _marks(self._engine)
        states = self._engine.strategy.states
        names = {slot.name for state in states for slot in state.bucket.slots}
        moved = {name for name, marks in now.items() if marks != self._before[name]}
        told = self._engine.world.axis("world").gather_objects((names, self._touched, moved))
        names, touched, moved = (set().union(*part) for part in zip(*told, strict=True))
        # an asynchronous schedule updates inside a step, and a weight that moved had a gradient
        touched |= moved
        unused = [name for name in sorted(names - touched) if not _is_idle_expert(name, touched)]
        if self._num_steps and self._num_still == self._num_steps:
            self._say(
                "the gradient of every parameter was exactly 0 in each of the first "
                f"{self._num_steps} steps, "
                "so nothing is trained: look at what the loss is computed from"
            )
        if unused:
            self._say(
                f"no gradient has reached {some_of(unused)}: no rank used them in these steps, or "
                "their output is detached "
                "before the loss; if that is meant, freeze them by requires_grad_(False)"
            )
        still = sorted(touched - moved)
        if self._num_steps == STEPS and still and self._num_still < self._num_steps:
            self._say(
                f"the first {STEPS} steps did not move {some_of(still)}: their gradients are 0, or "
                "lr is too small "
                "for the precision of the weights"
            )

    def _say(self, message: str) -> None:
        self.warnings.append(message)
        self._warn(message)


def _is_idle_expert(name: str, others: Iterable[str]) -> bool:
    """Whether the name is of one expert in a list whose other experts have what this one lacks."""
    match = re.search(r"(?i)^(.*expert[^.]*\.)\d+(\..*)$", name)
    if match is None:
        return False
    sibling = re.compile(rf"{re.escape(match[1])}\d+{re.escape(match[2])}")
    return any(sibling.fullmatch(other) for other in others)


def _marks(engine: Engine) -> dict[str, list[Mark]]:
    """A mark of each part of a parameter that this rank updates, by the parameter's name."""
    marks: dict[str, list[Mark]] = {}
    for piece in engine.strategy.pieces:
        marks.setdefault(piece.name, []).append(_mark(piece.value.detach()))
    return marks


def _mark(value: Tensor) -> Mark:
    """Two numbers of all bits, without a copy: they differ where one element does."""
    flat = value.reshape(-1)
    whole = flat.view(torch.int16 if value.element_size() == 2 else torch.int32)
    return int(whole.sum(dtype=torch.int64)), float(torch.linalg.vector_norm(flat))
