"""The numbers that an optimizer changes in its own groups, such as a count of steps.

torch's optimizers keep all that they learn in `state`, by parameter. Others keep numbers beside the
learning rate in `param_groups`. A checkpoint holds these with each parameter of the group. So a run
can go on under a plan whose ranks have other groups.

A scheduler of the caller's own writes settings there, as the learning rate. Many compute the next
rate from it. A checkpoint holds these settings too, as torch's `state_dict` of an optimizer does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from plait import torch_internals
from plait.errors import OptimizerError

Number: TypeAlias = bool | int | float

RATE: Final = "lr"
FIRST_RATE: Final = "initial_lr"
"""The entry by which torch's schedulers know a group of theirs."""
RATES: Final = frozenset({RATE, FIRST_RATE, "max_lr", "min_lr", "swa_lr"})
BETAS: Final = ("beta1", "beta2", "beta3")
SETTINGS: Final = RATES.union(BETAS, ("momentum", "base_momentum", "max_momentum", "weight_decay"))
"""The settings that schedulers of a caller write into groups; each of `betas` has a name."""


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
        self._first = [numbers_of(group) for group in optimizer.param_groups]
        self._built = [_settings(group) for group in optimizer.param_groups]
        self.names: frozenset[str] = frozenset()
        self.has_schedule = has_schedule

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

    def note_schedule(self) -> None:
        """The rates are written by plait from now on."""
        self.has_schedule = True

    def of(self, param: Tensor) -> dict[str, Number]:
        """The numbers of the group of a parameter [...], by name; empty before the first step.

        Settings are among them where they are not those of the build. A rate that a scheduler
        writes always is.
        """
        index = self._group_of[id(param)]
        group = self._optimizer.param_groups[index]
        built = self._built[index]
        kept: dict[str, Number] = {
            name: value
            for name, value in _settings(group).items()
            if value != built.get(name) or (name == RATE and FIRST_RATE in group)
        }
        if self.has_schedule:
            kept = _without_rates(kept)
        kept.update({name: group[name] for name in self.names if name in group})
        return dict(sorted(kept.items()))

    def told(self) -> list[dict[str, float] | None]:
        """The settings of each group; None for one of which this rank has no elements."""
        groups = self._optimizer.param_groups
        return [_settings(group) if _has_elements(group) else None for group in groups]

    def take_of_others(self, told: Sequence[Sequence[Mapping[str, float] | None]]) -> None:
        """Set the groups of which this rank has no elements, by what the ranks have `told`.

        Ranks with another number of groups have groups of another kind.
        """
        own = self.told()
        alike = [others for others in told if len(others) == len(own)]
        for index, group in enumerate(self._optimizer.param_groups):
            known = next((others[index] for others in alike if others[index] is not None), None)
            if own[index] is None and known is not None:
                _set(group, _without_rates(known) if self.has_schedule else known)

    def take(self, param: Tensor, saved: Mapping[str, Number]) -> None:
        """Set the numbers of the group of a parameter [...]; those that are not saved
        begin again.

        Settings do so too, but for those of a scheduler that was made after the save.
        """
        self.names |= saved.keys() - SETTINGS
        index = self._group_of[id(param)]
        group = self._optimizer.param_groups[index]
        for name in self.names - saved.keys():
            group.pop(name, None)
        group.update({name: one for name, one in self._first[index].items() if name in self.names})
        settings = {name: float(value) for name, value in saved.items() if name in SETTINGS}
        if FIRST_RATE in settings or FIRST_RATE not in group:
            settings = {**self._built[index], **settings}
        if self.has_schedule:
            settings = _without_rates(settings)
        _set(group, settings)
        group.update({name: value for name, value in saved.items() if name not in SETTINGS})


def numbers_of(group: Mapping[str, object]) -> dict[str, Number]:
    """The numbers of a group, which a step may change."""
    return {name: value for name, value in group.items() if isinstance(value, (int, float))}


def rates_of(optimizer: torch.optim.Optimizer) -> list[float | None]:
    """The learning rate of each group; None of one that has none, as A2Grad's."""
    rates = (group.get(RATE) for group in optimizer.param_groups)
    return [None if rate is None else float(rate) for rate in rates]


def set_rates(
    optimizer: torch.optim.Optimizer, rates: Sequence[float | None], factor: float
) -> None:
    """Set the learning rate of each group to `factor` times the one given.

    Raises `OptimizerError` where a group has none, and the factor is not 1.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group[RATE] = rate * factor
        elif factor != 1.0:
            raise OptimizerError(
                f"{type(optimizer).__name__} has no learning rate in its groups, so that no "
                f"schedule moves it, and one asks for {factor:g} times as much; leave the schedule "
                "out, or give the optimizer a learning rate"
            )


def _has_elements(group: Mapping[str, Any]) -> bool:
    """Whether this rank has a part of a parameter of a group."""
    return any(param.numel() for param in group["params"])


def _settings(group: Mapping[str, Any]) -> dict[str, float]:
    """The settings of a group that a scheduler may change, by name."""
    known = {name: value for name, value in group.items() if name in SETTINGS}
    known.update(zip(BETAS, group.get("betas") or (), strict=False))
    return {name: float(value) for name, value in known.items() if _is_one(value)}


def _without_rates(settings: Mapping[str, Number]) -> dict[str, Number]:
    """The settings of a group but for its rates, which plait writes itself."""
    return {name: value for name, value in settings.items() if name not in RATES}


def _is_one(value: object) -> bool:
    """Whether a setting is one number, of Python or of a library."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


def _set(group: dict[str, Any], settings: Mapping[str, float]) -> None:
    """Write settings into a group, into a tensor in its place."""
    now = _settings(group)
    for name, value in settings.items():
        if value == now.get(name):
            continue
        if isinstance(group.get(name), Tensor):
            group[name].fill_(value)
        elif name in BETAS and "betas" in group:
            betas = list(group["betas"])
            betas[BETAS.index(name)] = value
            group["betas"] = tuple(betas)
        else:
            group[name] = value
