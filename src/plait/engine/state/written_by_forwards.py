"""Warnings where the forwards of a step write into parameters, and one device has one forward.

A network that follows another one moves in each, and the vector of a spectral norm too. Glow's
ActNorm sets a parameter by its first samples, and sees those of one part of a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from torch import Tensor, nn

from plait.comm import World
from plait.engine.axes import data_axis
from plait.engine.norms_of_parameters import changed, norms_of
from plait.engine.state.carried import CarriedTensors
from plait.engine.state.local_parameters import LocalParameters
from plait.parallel.data import DataStrategy
from plait.parallel.data.absent import Absent
from plait.plan import Plan
from plait.torch_internals import is_recorded

STEPS: Final = 2
"""How many steps are looked at: in the first, a copy of a network is where the network is."""
FORWARDS: Final = 2
"""How many forwards of a step are looked at."""
CARRYING: Final = 8
"""How many forwards of a step are looked at for what one leaves to the next."""
NAMED: Final = 3
"""How many names a warning has."""


@dataclass(frozen=True)
class _Change:
    """The names of parameters, and of attributes that are flags, which a forward changed."""

    params: frozenset[str]
    flags: frozenset[str]


class WrittenByForwards:
    """Looks at the parameters of a rank around the first forwards of its first steps."""

    def __init__(
        self, holding: LocalParameters, strategy: DataStrategy, plan: Plan, world: World
    ) -> None:
        axis = data_axis(world)
        self._holding = holding
        self._strategy = strategy
        self._plan = str(plan)
        self._parts = axis.size * plan.micro_batches
        self._tells = axis.rank == 0 and world.axis("tp").rank == 0 and self._parts > 1
        self._steps_left = STEPS * self._tells
        self._compiles = plan.compile
        self._forwards = 0
        self._carried: CarriedTensors | None = None
        self._changes: list[_Change] = []
        self._first: list[_Change] = []

    def begin(self, num_micro_batches: int) -> None:
        """A step begins."""
        if self._tells and num_micro_batches > 1:
            self._tells = False
            _warn_of_spectral_norms(self._holding, self._plan, num_micro_batches)
            if not self._compiles:
                self._carried = CarriedTensors(self._holding.model)
        self._forwards = 0

    def during(self, forward: Callable[[], None]) -> None:
        """Do a forward, and note what it changes."""
        self._forwards += 1
        if self._carried is not None and self._forwards <= CARRYING and not is_recorded():
            forward = partial(self._carried.during, forward)
        if not self._steps_left or self._forwards > FORWARDS or is_recorded():
            forward()
            return
        norms, numbers = self._norms(), self._numbers()
        forward()
        written = changed(norms, self._norms())
        # A flag or a first count is set so; a size that a forward notes is not.
        flags = {
            key for key, value in self._numbers().items() if {numbers.get(key), value} == {0.0, 1.0}
        }
        self._changes.append(_Change(frozenset(written), frozenset(flags)))

    def end(self) -> None:
        """The step has ended: tell of what its forwards have written."""
        if self._carried is not None and self._carried.end(self._plan):
            self._carried = None
        if not self._steps_left:
            return
        changes, self._changes = self._changes, []
        moved = self._moved(changes)
        if moved:
            _warn_of_moves(moved, self._plan, self._forwards)
        known = len(self._first)
        self._first += changes
        if known < FORWARDS <= len(self._first):
            found = self._set_once(*self._first[:FORWARDS])
            if found:
                _warn_of_first_samples(found, self._plan, self._parts)
        self._steps_left = 0 if moved else self._steps_left - 1

    def _moved(self, changes: list[_Change]) -> list[str]:
        """The frozen parameters that each of several forwards has moved.

        An optimizer moves the others, and a table with `max_norm` is the same after a second look.
        """
        if len(changes) < FORWARDS:
            return []
        model = self._holding.model
        names = frozenset.intersection(*(one.params for one in changes)) - self._bounded()
        return [name for name in sorted(names) if not model.get_parameter(name).requires_grad]

    def _set_once(self, first: _Change, second: _Change) -> list[str]:
        """The trained parameters that the first forward alone has set, as a number near them tells.

        A bound on weights is such a write too, and sets no flag.
        """
        owners = {name.rpartition(".")[0] for name in first.flags - second.flags}
        found = []
        for name in sorted(first.params - second.params - self._bounded()):
            near = any(not owner or name.startswith(f"{owner}.") for owner in owners)
            if near and self._holding.model.get_parameter(name).requires_grad:
                found.append(name)
        return found

    def _norms(self) -> dict[str, Tensor]:
        """The norm (0-dim) of each parameter, or of this rank's part."""
        tensors: dict[str, Tensor] = {
            name: param
            for name, param in self._holding.params.items()
            if not isinstance(param, Absent)
        }
        return norms_of(
            tensors | {one.name: one.values for one in self._strategy.frozen_shards(trained=True)}
        )

    def _bounded(self) -> set[str]:
        """The tables with a bound on norms, into which each look writes."""
        return {
            f"{path}.weight".lstrip(".")
            for path, module in self._holding.model.named_modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        }

    def _numbers(self) -> dict[str, float]:
        """The numbers in attributes and in buffers of one number, by their paths."""
        found = {}
        for path, module in self._holding.model.named_modules():
            for table in (vars(module), module._buffers):
                for name, value in table.items():
                    if type(value) in (bool, int):
                        found[f"{path}.{name}"] = float(value)
                    elif type(value) is Tensor and value.numel() == 1 and not value.is_meta:
                        found[f"{path}.{name}"] = float(value.detach().real)
        return found


def _named(names: Iterable[str]) -> str:
    known = list(names)
    more = len(known) - NAMED
    return ", ".join(f"'{one}'" for one in known[:NAMED]) + (f" and {more} more" * (more > 0))


def _warn_of_moves(names: list[str], plan: str, forwards: int) -> None:
    warnings.warn(
        f"the forward moves the frozen parameters {_named(names)}, and the plan '{plan}' runs it "
        f"{forwards} times in a step, so that they move {forwards} times where one device moves "
        "them once; take mb out of a plan without pp, write mb1 with a pp of one stage a rank, or "
        "move them between two steps",
        stacklevel=2,
    )


def _warn_of_first_samples(names: list[str], plan: str, parts: int) -> None:
    warnings.warn(
        f"the first forward sets the trained parameters {_named(names)}, and under the plan "
        f"'{plan}' it has one of {parts} parts of a batch; each data rank has set its own, unlike "
        "one device: call the model once with a whole batch before plait.build",
        stacklevel=2,
    )


def _warn_of_spectral_norms(holding: LocalParameters, plan: str, num: int) -> None:
    modules = holding.model.named_modules()
    norms = [path.partition(".parametrizations.")[0] for path, one in modules if _is_normed(one)]
    found = [path for path in norms if any(name.startswith(f"{path}.") for name in holding.params)]
    if found:
        warnings.warn(
            f"the spectral norm of {_named(found)} iterates once in each forward, and the "
            f"plan '{plan}' runs {num} in a step; one device iterates once, so that weights differ "
            f"until the iteration has converged; {num} batches whose gradients are added on one "
            "device do the same; take mb out of a plan without pp, or give spectral_norm a larger "
            "n_power_iterations",
            stacklevel=2,
        )


def _is_normed(module: nn.Module) -> bool:
    """Whether a module has a spectral norm, or is one, of the two kinds that torch has."""
    hooks = module._forward_pre_hooks.values()
    kinds = [type(one) for one in (module, *hooks)]
    return any(
        kind.__module__.startswith("torch.nn.utils") and kind.__name__.endswith("SpectralNorm")
        for kind in kinds
    )
