"""Numbers in attributes that a forward counts in, as `self.calls += 1` for a schedule in the model.

A micro-batch is counted as one forward of its own, unlike on one device, so this is told once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from plait.engine.loss_modules import LossModules
from plait.engine.state.numbers import Slot, numbers_of
from plait.errors import some_of


class CountedForwards:
    """Warns after the first step of a model whose forward counts each of several micro-batches."""

    def __init__(
        self, model: nn.Module, loss_modules: LossModules, plan: str, *, tells: bool
    ) -> None:
        self._model = model
        self._loss_modules = loss_modules
        self._plan = plan
        self._left = int(tells)
        self._num = 0
        self._changes: dict[Slot, list[tuple[float, float]]] = {}

    def begin(self, num_micro_batches: int) -> None:
        """A step begins; the first is looked at, if it has several micro-batches."""
        self._num = num_micro_batches if self._left and num_micro_batches > 1 else 0
        self._left = 0

    def during(self, forward: Callable[[], None], num_samples: int) -> None:
        """Do the forward of a micro-batch and note which numbers it changes."""
        if not self._num:
            forward()
            return
        before = dict(self._values())
        forward()
        for slot, value in self._values():
            old = before.get(slot, value)
            # What rises by its samples, or by their tokens, counts the same for any micro-batches.
            counts_samples = num_samples > 1 and (value - old) % num_samples == 0
            if value != old and not counts_samples:
                self._changes.setdefault(slot, []).append((old, value))

    def end(self) -> None:
        """The step has ended: tell of what was counted in it."""
        num, self._num = self._num, 0
        changes, self._changes = self._changes, {}
        found = [".".join(filter(None, slot)) for slot, pairs in changes.items() if _counts(pairs)]
        if num and found:
            _warn(found, self._plan, num)

    def _values(self) -> Iterator[tuple[Slot, float]]:
        """The numbers in attributes and in buffers of one number, but those of norms."""
        modules = chain(self._model.named_modules(), self._loss_modules.named_modules())
        for module, slot, value in numbers_of(modules):
            if isinstance(module, _NormBase) or type(value) is bool:
                continue
            if not isinstance(value, Tensor):
                yield slot, value
            elif not (value.dtype is torch.bool or value.is_complex() or value.requires_grad):
                yield slot, value.item()


def _counts(pairs: list[tuple[float, float]]) -> bool:
    """Whether each forward added one number, or multiplied by one."""
    first, *others = pairs
    if not others:
        return False
    step, ratio = first[1] - first[0], first[1] * others[0][0]
    added = all(abs(new - old - step) <= 1e-6 * abs(step) for old, new in others)
    return added or (first[0] != 0 and abs(ratio - others[0][1] * first[0]) <= 1e-6 * abs(ratio))


def _warn(names: list[str], plan: str, num: int) -> None:
    warnings.warn(
        f"the forward counts in {some_of(map(repr, names))}, and the plan '{plan}' runs it for "
        f"each of {num} micro-batches of a step: {num} are counted where one device counts 1, so "
        "what is computed from the number is not what one device computes; count steps outside of "
        "the model and pass the number in the batch, or take mb out of a plan without pp",
        stacklevel=2,
    )
