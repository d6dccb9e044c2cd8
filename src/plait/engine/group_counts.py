"""The numbers that an optimizer changes in its own groups, such as a count of steps.

torch's optimizers keep all that they learn in `state`, by parameter. Others keep numbers beside the
learning rate in `param_groups`. A checkpoint holds these with each parameter of the group. So a run
can go on under a plan whose ranks have other groups.

A scheduler of the caller's own writes settings there, as the learning rate. Many compute the next
rate from it. A checkpoint holds these settings too, as torch's `state_dict` of an optimizer does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from plait import torch_internals

Number: TypeAlias = bool | int | float

SETTINGS = frozenset({"lr", "momentum", "weight_decay"})
"""The settings that schedulers of a caller write into groups."""


class GroupCounts:
    """The numbers that `step` changes in the groups of one optimizer.

    Settings that a caller has changed are kept beside them.

    Attributes:
        names: of the numbers that `step` changes.
        has_schedule: whether plait itself writes the rates, which are then not kept.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, has_schedule: bool = False) -> None:
        self._optimizer = optimizer
        self._group_of = {
            id(param): index
            for index, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        self._first = [_numbers(group) for group in optimizer.param_groups]
        self.names: frozenset[str] = frozenset()
        self.has_schedule = has_schedule

    def step(self) -> None:
        """One step of the optimizer; learn which numbers it changes."""
        groups = self._optimizer.param_groups
        before = [_numbers(group) for group in groups]
        torch_internals.step(self._optimizer)
        for old, group in zip(before, groups, strict=True):
            new = _numbers(group)
            if new != old:
                changed = {name for name, value in new.items() if old.get(name) != value}
                self.names |= changed

    def note_schedule(self) -> None:
        """The rates are written by plait from now on."""
        self.has_schedule = True

    def of(self, param: Tensor) -> dict[str, Number]:
        """The numbers of the group of a parameter [...], by name; empty before the first step.

        Settings are among them where they are not those of the build.
        """
        index = self._group_of[id(param)]
        group = self._optimizer.param_groups[index]
        first = self._first[index]
        settings = _numbers(group).keys() & self._settings() & first.keys()
        changed = {name for name in settings if group[name] != first[name]}
        return {name: group[name] for name in sorted(self.names | changed) if name in group}

    def take(self, param: Tensor, saved: Mapping[str, Number]) -> None:
        """Set the numbers of the group of a parameter [...]; those that are not saved
        begin again.
        """
        self.names |= saved.keys() - SETTINGS
        index = self._group_of[id(param)]
        group = self._optimizer.param_groups[index]
        for name in self.names - saved.keys():
            group.pop(name, None)
        known = self.names | self._settings()
        group.update({name: one for name, one in self._first[index].items() if name in known})
        group.update(saved)

    def _settings(self) -> frozenset[str]:
        """The settings that a caller may have changed."""
        return SETTINGS - {"lr"} if self.has_schedule else SETTINGS


def _numbers(group: Mapping[str, object]) -> dict[str, Number]:
    """The numbers of a group, which a step may change."""
    return {name: value for name, value in group.items() if isinstance(value, (int, float))}
