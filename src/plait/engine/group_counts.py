"""The numbers that an optimizer changes in its own groups, such as a count of steps.

torch's optimizers keep all that they learn in `state`, by parameter. Others keep numbers beside the
learning rate in `param_groups`. A checkpoint holds these with each parameter of the group. So a run
can go on under a plan whose ranks have other groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from plait import torch_internals

Number: TypeAlias = bool | int | float


class GroupCounts:
    """The numbers that `step` changes in the groups of one optimizer.

    Settings that others change, as a schedule does with `lr`, are not among them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._group_of = {
            id(param): index
            for index, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        self._first = [numbers_of(group) for group in optimizer.param_groups]
        self.names: frozenset[str] = frozenset()

    def note(self, names: Iterable[str]) -> None:
        """Count numbers with these names too, which others than `step` change."""
        self.names |= frozenset(names)

    def step(self) -> None:
        """One step of the optimizer; learn which numbers it changes."""
        groups = self._optimizer.param_groups
        before = [numbers_of(group) for group in groups]
        torch_internals.step(self._optimizer)
        for old, group in zip(before, groups, strict=True):
            new = numbers_of(group)
            if new != old:
                changed = {name for name, value in new.items() if old.get(name) != value}
                self.names |= changed

    def of(self, param: Tensor) -> dict[str, Number]:
        """The numbers of the group of a parameter [...], by name; empty before the first step."""
        if not self.names:
            return {}
        group = self._optimizer.param_groups[self._group_of[id(param)]]
        return {name: group[name] for name in sorted(self.names) if name in group}

    def take(self, param: Tensor, saved: Mapping[str, Number]) -> None:
        """Set the numbers of the group of a parameter [...]; those that are not saved
        begin again.
        """
        self.names |= saved.keys()
        if not self.names:
            return
        index = self._group_of[id(param)]
        group = self._optimizer.param_groups[index]
        for name in self.names - saved.keys():
            group.pop(name, None)
        group.update({name: one for name, one in self._first[index].items() if name in self.names})
        group.update(saved)


def numbers_of(group: Mapping[str, object]) -> dict[str, Number]:
    """The numbers of a group, which a step may change."""
    return {name: value for name, value in group.items() if isinstance(value, (int, float))}
