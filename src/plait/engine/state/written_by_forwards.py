"""Warnings where the forwards of a step write into parameters, and one device has one forward.

A network that follows another one moves in each, and the vector of a spectral norm too. Glow's
ActNorm sets a parameter by its first samples, and sees those of one part of a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from torch import Tensor, nn

from plait.comm import World
from plait.engine.axes import data_axis
from plait.engine.loss_modules import LossModules
from plait.engine.norms_of_parameters import changed, norms_of
from plait.engine.state.carried import CarriedTensors
from plait.engine.state.local_parameters import LocalParameters
from plait.engine.state.numbers import Slot, numbers_of
from plait.engine.state.spectral_norms import warn_of_spectral_norms
from plait.errors import some_of
from plait.parallel.data import DataStrategy
from plait.parallel.data.absent import Absent
from plait.plan import Plan
from plait.plan.facts import SCHEDULES
from plait.torch_internals import is_recorded

STEPS: Final = 2
"""How many steps are looked at: in the first, a copy of a network is where the network is."""
FORWARDS: Final = 2
"""How many forwards of a step are looked at."""
CARRYING: Final = 8
"""How many forwards of a step are looked at for what one leaves to the next."""


@dataclass(frozen=True)
class _Change:
    """The names of parameters, and the places of flags, which a forward changed."""

    params: frozenset[str]
    flags: frozenset[Slot]


class WrittenByForwards:
    """Has the first forwards of the first steps looked at, and tells what the looks have found."""

    def __init__(
        self,
        holding: LocalParameters,
        loss_modules: LossModules,
        strategy: DataStrategy,
        plan: Plan,
        world: World,
    ) -> None:
        axis = data_axis(world)
        parts = axis.size * plan.micro_batches
        self._holding = holding
        self._loss_modules = loss_modules
        self._plan = plan.text_with_micro_batches
        self._tells = axis.rank == 0 and world.axis("tp").rank == 0 and parts > 1
        self._steps_left = STEPS * self._tells
        self._compiles = plan.compile
        self._forwards = 0
        self._carried: CarriedTensors | None = None
        self._changes: list[_Change] = []
        self._look = _Look(holding, strategy)
        self._moved = _MovedParameters(holding.model, self._plan)
        self._set_once = _FirstSamples(holding.model, self._plan, parts)
        self._undone = _UndoneWrites(holding.model, plan, strategy)

    def begin(self, num_micro_batches: int) -> None:
        """A step begins."""
        if self._tells and num_micro_batches > 1:
            self._tells = False
            warn_of_spectral_norms(self._holding, self._plan, num_micro_batches)
            if not self._compiles:
                self._carried = CarriedTensors(self._holding.model, self._loss_modules)
        self._forwards = 0

    def during(self, forward: Callable[[], None]) -> None:
        """Do a forward, and note what it changes."""
        self._forwards += 1
        if self._carried is not None and self._forwards <= CARRYING and not is_recorded():
            forward = partial(self._carried.during, forward)
        if not self._steps_left or self._forwards > FORWARDS or is_recorded():
            forward()
        else:
            self._changes.append(self._look.during(forward))

    def end(self) -> None:
        """The step has ended: tell of what its forwards have written."""
        if self._carried is not None and self._carried.end(self._plan):
            self._carried = None
        if not self._steps_left:
            return
        changes, self._changes = self._changes, []
        is_told = self._moved.tell(changes, self._forwards)
        self._set_once.note(changes)
        self._undone.tell(changes)
        self._steps_left = 0 if is_told else self._steps_left - 1


class _Look:
    """Sees which parameters and which flags of a rank a forward changes."""

    def __init__(self, holding: LocalParameters, strategy: DataStrategy) -> None:
        self._holding = holding
        self._strategy = strategy

    def during(self, forward: Callable[[], None]) -> _Change:
        """Do a forward; what it changes."""
        norms, numbers = self._norms(), self._numbers()
        forward()
        written = changed(norms, self._norms()) - _bounded(self._holding.model)
        # A flag or a first count is set so; a size that a forward notes is not.
        now = self._numbers().items()
        flags = {slot for slot, value in now if {numbers.get(slot), value} == {0.0, 1.0}}
        return _Change(frozenset(written), frozenset(flags))

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

    def _numbers(self) -> dict[Slot, float]:
        return {
            slot: float(value.detach().real if isinstance(value, Tensor) else value)
            for _, slot, value in numbers_of(self._holding.model.named_modules())
        }


def _bounded(model: nn.Module) -> set[str]:
    """The tables with a bound on norms, into which each look writes."""
    return {
        f"{path}.weight".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    }


class _MovedParameters:
    """Frozen parameters that each of several forwards of a step moves."""

    def __init__(self, model: nn.Module, plan: str) -> None:
        self._model = model
        self._plan = plan

    def tell(self, changes: list[_Change], forwards: int) -> bool:
        """Whether forwards of a step have moved some, of which a warning tells.

        An optimizer moves the others, and a table with `max_norm` is the same after a second look.
        """
        if len(changes) < FORWARDS:
            return False
        names = sorted(frozenset.intersection(*(one.params for one in changes)))
        moved = [name for name in names if not self._model.get_parameter(name).requires_grad]
        if moved:
            warnings.warn(
                f"the forward moves the frozen parameters {some_of(map(repr, moved))}, and the "
                f"plan '{self._plan}' runs it {forwards} times in a step, so that they move "
                f"{forwards} times where one device moves them once; take mb out of a plan without "
                "pp, write mb1 with a pp of one stage a rank, or move them between two steps",
                stacklevel=2,
            )
        return bool(moved)


class _UndoneWrites:
    """Trained parameters that a forward writes, where the update writes masters over them."""

    def __init__(self, model: nn.Module, plan: Plan, strategy: DataStrategy) -> None:
        self._model = model
        self._plan = plan
        group = strategy.group
        synchronous = plan.pp.size == 1 or not SCHEDULES[plan.pp.schedule].asynchronous
        has_masters = group.param_dtype != group.master_dtype or plan.dp.offload
        self._tells = synchronous and has_masters and plan.dp.strategy != "async-server"

    def tell(self, changes: list[_Change]) -> None:
        """Warn once of the parameters that the forwards of a step have written."""
        names = sorted(frozenset[str]().union(*(one.params for one in changes)))
        undone = [name for name in names if self._model.get_parameter(name).requires_grad]
        if undone and self._tells:
            self._tells = False
            warnings.warn(
                f"the forward writes into the trained parameters {some_of(map(repr, undone))}, and "
                f"the plan '{self._plan}' updates masters apart from what layers compute with, so "
                "that the next update undoes it; compute with the bounded or scaled value in the "
                "forward instead of writing it, or take precision:bf16 and offload out of the plan",
                stacklevel=2,
            )


class _FirstSamples:
    """Trained parameters that the first forward of all sets, as a number near them tells."""

    def __init__(self, model: nn.Module, plan: str, parts: int) -> None:
        self._model = model
        self._plan = plan
        self._parts = parts
        self._first: list[_Change] = []

    def note(self, changes: list[_Change]) -> None:
        """Take what the forwards of a step have changed; warn once the first two are there."""
        known = len(self._first)
        self._first += changes
        found = self._found(*self._first[:FORWARDS]) if known < FORWARDS <= len(self._first) else []
        if found:
            warnings.warn(
                f"the first forward sets the trained parameters {some_of(map(repr, found))}, and "
                f"under the plan '{self._plan}' it has one of {self._parts} parts of a batch; each "
                "data rank has set its own, unlike one device: call the model once with a whole "
                "batch before plait.build",
                stacklevel=2,
            )

    def _found(self, first: _Change, second: _Change) -> list[str]:
        """Parameters that the first forward alone has set. A bound on weights sets no flag."""
        owners = {path for path, _ in first.flags - second.flags}
        found = []
        for name in sorted(first.params - second.params):
            near = any(not owner or name.startswith(f"{owner}.") for owner in owners)
            if near and self._model.get_parameter(name).requires_grad:
                found.append(name)
        return found
