"""Numbers in attributes that a forward counts in, as `self.calls += 1` for a schedule in the model.

Tensors that it keeps there for the next forward are treated alike.

The forward that backward repeats finds them as the first run did, and leaves them unchanged. A
micro-batch is counted as one forward of its own, unlike on one device, so this is told once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from plait.engine.loss_modules import LossModules
from plait.engine.state.buffers import Context
from plait.engine.state.numbers import Slot, numbers_of
from plait.errors import some_of

_OF_TORCH = frozenset(vars(nn.Module()))
_ABSENT = object()


class FirstCounts:
    """Around the first forward of a block: remembers the numbers and tensors that it changes.

    They are those in attributes of its modules, such as a memory of the last step.
    """

    def __init__(self, inner: Context, block: nn.Module) -> None:
        self._inner = inner
        self._tables = [vars(module) for module in block.modules()]
        self._values: list[dict[str, Any]] = []
        self.before: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> None:
        self._values = [dict(table) for table in self._tables]
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        pairs = zip(self._tables, self._values, strict=True)
        self.before = [entry for table, values in pairs for entry in _changed(table, values)]
        self._values = []


class RepeatedCounts:
    """Around the same forward run again: the attributes as before the first run, and afterwards
    as they are now.
    """

    def __init__(self, first: FirstCounts, inner: Context) -> None:
        self._first = first
        self._inner = inner
        self._now: list[Any] = []

    def __enter__(self) -> None:
        self._now = [table.get(name, _ABSENT) for table, name, _ in self._first.before]
        for table, name, value in self._first.before:
            _put(table, name, value)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            for (table, name, _), value in zip(self._first.before, self._now, strict=True):
                _put(table, name, value)


def _changed(
    table: dict[str, Any], before: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The attributes that were nothing, a number or a tensor before, and hold another one now."""
    for name in [name for name in table if name not in _OF_TORCH]:
        old = before.get(name, _ABSENT)
        if table[name] is not old and _is_plain(old) and _is_plain(table[name]):
            yield table, name, _without_graph(old)


def _without_graph(value: Any) -> Any:
    """A tensor [...] without its graph, which would keep those of all forwards before it.

    Modes that watch what the forward reads do not see this.
    """
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    with torch._C.DisableTorchFunction():
        return value.detach().requires_grad_()


def _is_plain(value: object) -> bool:
    is_kept = value is _ABSENT or value is None or type(value) in (int, float)
    return is_kept or isinstance(value, Tensor)


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


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
