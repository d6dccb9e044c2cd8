"""Replayed stages, for a model that is no chain: each runs the model's own forward.

Only the stage's own units compute. The units of earlier stages return the received results that are
needed here or later. For other results they return placeholders of the right shape. At the first
unit of a later stage the forward ends. So every stage computes the glue (masks, positions, rotary
tables). Results of a unit for several later ones (position biases, encoder states, skips) are
carried along. So are tensors that units leave in attributes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from plait import regions
from plait.errors import ModelError
from plait.parallel.pipeline.dataflow import Flow
from plait.parallel.pipeline.elsewhere import leave_out
from plait.parallel.pipeline.kept_parameters import is_in_parameter
from plait.parallel.pipeline.leaving import StageDone, way_out
from plait.parallel.pipeline.payload import Nesting, Payload, TensorForm, check_sendable, get_state
from plait.parallel.pipeline.side_effects import Attribute, Place, number_of, value_at
from plait.parallel.pipeline.stage import StageModule
from plait.parallel.pipeline.unsent import zeros_for
from plait.parallel.pipeline.watch import Result
from plait.torch_internals import in_autograd_function
from plait.values import PyTree

_ABSENT = object()
"""The value of an attribute that a module does not have."""


@dataclass(frozen=True)
class _Form:
    """The form of a value: its nesting, and forms of tensors or other leaves."""

    nesting: Nesting
    leaves: tuple[PyTree, ...]

    @classmethod
    def of(cls, leaves: Sequence[object], structure: TreeSpec) -> _Form:
        forms = (TensorForm.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(Nesting.of(structure), tuple(forms))


@dataclass(frozen=True)
class _Template:
    """The form of what a call returns, and of what it leaves in attributes for later stages.

    `plain` are the plain values that it leaves.
    """

    returned: _Form
    attributes: tuple[tuple[Attribute, _Form], ...]
    plain: tuple[tuple[Place, object], ...]


@dataclass
class _ReplayState:
    """One forward of one stage."""

    received: dict[Result, Tensor]
    templates: list[_Template]
    restore: Callable[[], None]
    has_backward: bool
    call: int = 0
    made: dict[Result, Tensor] = field(default_factory=dict)
    random: Tensor | None = None  # the generator's state after this stage's units


@dataclass
class Replay:
    """The calls of a model and their stages; shared by a rank's stages, one of which runs.

    `own` are the values that modules held where a stand-in left others in their attributes.
    `begins` and `ends` are called round each forward of a stage.
    """

    flow: Flow
    stage_of: Sequence[int]
    model: nn.Module
    running: ReplayedStage | None = None
    units: dict[str, nn.Module] = field(default_factory=dict)
    own: dict[Place, object] = field(default_factory=dict)
    begins: Callable[[], None] = lambda: None
    ends: Callable[[], None] = lambda: None

    def leave(self, place: Place, value: object) -> None:
        """Let an attribute hold what a call of another stage left there, until `restore`."""
        owner, name = place
        module = self.model.get_submodule(owner)
        self.own.setdefault(place, getattr(module, name, _ABSENT))
        setattr(module, name, value)

    def restore(self) -> None:
        """Give the modules the values back that stand-ins have replaced.

        Another stage of this rank may run them, and goes on from its own values.
        """
        for (owner, name), value in self.own.items():
            module = self.model.get_submodule(owner)
            if value is not _ABSENT:
                setattr(module, name, value)
            elif hasattr(module, name):
                delattr(module, name)
        self.own.clear()

    def called(self, name: str) -> None:
        """A module has run, so what its attributes hold now is its own."""
        inside = f"{name}."
        for place in [place for place in self.own if f"{place[0]}.".startswith(inside)]:
            del self.own[place]

    def install(self, stages: Collection[int]) -> None:
        """Let every unit ask who runs. Attributes that no stage among `stages` has tell so."""
        model = self.model
        for attribute in self._missing(stages):
            leave_out(attribute, model)
        for name in dict.fromkeys(self.flow.calls):
            module = self.units[name] = model.get_submodule(name)
            module.forward = self._replayed(name, module.forward)

    def _missing(self, stages: Collection[int]) -> list[Attribute]:
        """The attributes of units that run on other ranks alone, and reach no stage here."""
        flow = self.flow
        names = {flow.calls[call] for call, stage in enumerate(self.stage_of) if stage in stages}
        run = {part for name in names for part in self.model.get_submodule(name).modules()}
        arriving = set[Result]()
        for stage in stages:
            arriving.update(flow.crossing(self.stage_of, stage - 1))
        missing = []
        for call, attributes in enumerate(flow.attributes):
            for attribute in attributes:
                places = {Result(call, place) for place in attribute.places}
                owner = self.model.get_submodule(attribute.owner)
                if owner not in run and not places & arriving:
                    missing.append(attribute)
        return missing

    def _replayed(self, name: str, forward: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> PyTree:
            running = self.running
            if running is None:
                return forward(*args, **kwargs)
            return running.call(name, forward, args, kwargs)

        return call


ParameterSwap = tuple[nn.Module, str, nn.Parameter]


class ReplayedStage(StageModule):
    """One stage that replays the model's forward.

    `swaps`: parameters that another stage of this rank uses in the same modules, in another copy.
    What earlier stages computed and did not send is zeros on `device`.
    """

    def __init__(
        self,
        run: Callable[[PyTree], object],
        replay: Replay,
        stage: int,
        swaps: Sequence[ParameterSwap] = (),
        *,
        device: torch.device,
    ) -> None:
        self._model = run
        self._replay = replay
        self._stage = stage
        self._swaps = list(swaps)
        self._device = device
        self._way_out = way_out(replay.model)
        stage_of = replay.stage_of
        flow = replay.flow
        own = [call for call, holder in enumerate(stage_of) if holder == stage]
        self._first_call = own[0]
        self._last_call = own[-1]
        self._is_last = stage == max(stage_of)
        self._arriving = flow.crossing(stage_of, stage - 1) if stage else ()
        self._leaving = () if self._is_last else flow.crossing(stage_of, stage)
        self._unread = frozenset(
            place for place, result in enumerate(self._leaving) if result in flow.unread
        )
        self._sources = tuple(flow.calls[result.call] for result in self._leaving)
        self._attributes = _leaving_attributes(flow, self._leaving)
        self._now: _ReplayState | None = None

    def enter(self) -> None:
        """Put this stage's copies of shared parameters where the modules look for them."""
        for module, key, param in self._swaps:
            module._parameters[key] = param

    def forward(self, inputs: PyTree, received: Payload | None) -> PyTree:
        arrived = (
            {} if received is None else dict(zip(self._arriving, received.tensors, strict=True))
        )
        templates = [] if received is None else list(received.note)
        restore = _nothing if received is None else received.restore
        now = _ReplayState(arrived, templates, restore, torch.is_grad_enabled())
        self._now = now
        self.enter()
        self._replay.restore()
        self._replay.begins()
        self._replay.running = self
        try:
            with regions.dissolved():
                output = self._model(inputs)
        except (StageDone, Exception):
            if now.call <= self._last_call + 1:
                raise
        finally:
            self._replay.running = None
            self._now = None
        self._replay.ends()
        if now.call > self._last_call + 1:  # even if code has caught it
            tensors = [
                now.received[result] if result in now.received else now.made[result]
                for result in self._leaving
            ]
            note, sources, unread = tuple(now.templates), self._sources, self._unread
            return Payload(tensors, note, random=now.random, sources=sources, unread=unread)
        if not self._is_last or now.call <= self._last_call:
            raise ModelError(
                f"the forward of the model ended after {now.call} of "
                f"{len(self._replay.flow.calls)} calls that the example made; "
                "a pipeline needs a model that calls the same modules for every batch"
            )
        return output

    def call(
        self, name: str, forward: Callable[..., PyTree], args: PyTree, kwargs: Mapping[str, PyTree]
    ) -> PyTree:
        """A unit of the model is called in this stage's forward.

        Raises:
            ModelError: the forward calls another module than with the example.
        """
        now = self._now
        replay = self._replay
        assert now is not None  # `running` is set only while there is a run
        number = now.call
        calls = replay.flow.calls
        if number >= len(calls) or calls[number] != name:
            expected = f"'{calls[number]}'" if number < len(calls) else "its end"
            raise ModelError(
                f"call {number} of the forward is '{name}' and was {expected} with the example; "
                "a pipeline needs a model that calls the same modules in the same order "
                "for every batch"
            )
        now.call += 1
        if number > self._last_call:
            raise self._way_out
        if replay.stage_of[number] < self._stage:
            # Glue before draws what it drew there; from here on the stage before has drawn too.
            if number == self._first_call - 1:
                now.restore()
            return self._stand_in(now, number)
        if now.has_backward and not torch.is_grad_enabled() and in_autograd_function():
            self._check_frozen(name)
        replay.running = None  # calls inside a unit are not replayed
        try:
            output = regions.run_unit(forward, args, kwargs)
        finally:
            replay.running = self
            replay.called(name)
        return output if self._is_last else self._record(now, number, output)

    def _check_frozen(self, name: str) -> None:
        """Raise for a unit with trainable parameters that is called inside an
        `autograd.Function`.
        """
        params = self._replay.units[name].named_parameters()
        trainable = next((key for key, param in params if param.requires_grad), None)
        if trainable is not None:
            raise ModelError(
                f"'{name}' is called without autograd although '{trainable}' is trained, inside an "
                "autograd.Function; a pipeline passes gradients between stages by autograd: "
                "write the model without it, or train it without pp"
            )

    def _stand_in(self, now: _ReplayState, number: int) -> object:
        """The result of an earlier unit: the tensors that were received, and zeros for the rest.

        Glue that writes into a result does so here as it did there, so it gets memory of its own.
        """
        template = now.templates[number]
        name, written = self._replay.flow.calls[number], self._replay.flow.written

        def value(place: int, leaf: PyTree) -> PyTree:
            result = Result(number, place)
            if not isinstance(leaf, TensorForm):
                return leaf
            if result in now.received:
                received = now.received[result]
                return received.clone() if result in written else received
            zeros = zeros_for(name, leaf, self._device, has_backward=now.has_backward)
            return zeros.clone() if result in written else zeros

        for attribute, form in template.attributes:
            if any(Result(number, place) in now.received for place in attribute.places):
                tensors = map(value, attribute.places, form.leaves)
                self._replay.leave(attribute.place, form.nesting.value(tensors))
        for place, plain in template.plain:
            self._replay.leave(place, plain)
        returned = template.returned
        return returned.nesting.value(map(value, itertools.count(), returned.leaves))

    def _record(self, now: _ReplayState, number: int, output: PyTree) -> PyTree:
        """Note what a unit returned; the same for the glue of this stage.

        Glue that hooks into the gradient of a result does so here and where the result arrives. So
        a tensor that leaves is another than that of the glue.
        """
        leaves, structure = tree_flatten(output)
        returned = _Form.of(leaves, structure)
        self._keep(now, number, enumerate(leaves))
        if number == self._last_call:
            devices = (leaf.device for leaf in leaves if isinstance(leaf, Tensor))
            now.random = get_state(next(devices, torch.device("cpu")))
        attributes = []
        for attribute in self._attributes.get(number, ()):
            left, form = self._left(number, attribute)
            self._keep(now, number, zip(attribute.places, left, strict=True))
            attributes.append((attribute, form))
        plain = tuple(
            (place, value_at(self._replay.model, place))
            for place in self._replay.flow.plain[number]
        )
        now.templates.append(_Template(returned, tuple(attributes), plain))
        for place, leaf in enumerate(leaves):
            if Result(number, place) in now.made and leaf.requires_grad:
                leaves[place] = leaf.view_as(leaf)
        return tree_unflatten(leaves, structure)

    def _left(self, number: int, attribute: Attribute) -> tuple[list[PyTree], _Form]:
        """The tensors that a call left in an attribute, as many as with the example, and their
        form.

        Numbers that no code of the model reads may be missing. A list of them may grow, as a
        history does: the newest count.
        """
        value = attribute.value(self._replay.model)
        leaves, structure = tree_flatten(value)
        count = attribute.count
        results = {Result(number, place) for place in attribute.places}
        if self._replay.flow.unread >= results.intersection(self._leaving):
            if isinstance(value, list):
                leaves, structure = tree_flatten(leaves[-count:])
            leaves = [number_of(leaf, self._device) for leaf in leaves]
            form = _Form.of(leaves, structure)
            missing = torch.zeros(0, device=self._device)
            leaves = [missing if leaf is None else leaf for leaf in leaves]
            leaves += [missing] * (count - len(leaves))
        else:
            form = _Form.of(leaves, structure)
        if len(leaves) != count:
            raise ModelError(
                f"'{attribute.owner}.{attribute.name}' holds {len(leaves)} tensors and held "
                f"{count} with the example; a pipeline needs as many for every batch"
            )
        return leaves, form

    def _keep(self, now: _ReplayState, number: int, leaves: Iterable[tuple[int, PyTree]]) -> None:
        """Keep those results of a call, by their places, that leave this stage.

        Views of parameters are copied: their memory may be freed before they are sent.
        """
        name, written = self._replay.flow.calls[number], self._replay.flow.written
        for place, leaf in leaves:
            result = Result(number, place)
            if result in self._leaving:
                check_sendable(leaf, f"'{name}'")
                copies = result in written or is_in_parameter(leaf, self._replay.units[name])
                now.made[result] = leaf.clone() if copies else leaf


def _leaving_attributes(flow: Flow, leaving: Iterable[Result]) -> dict[int, list[Attribute]]:
    """The attributes of each call with tensors that leave the stage."""
    found: dict[int, list[Attribute]] = {}
    for result in leaving:
        for attribute in flow.attributes[result.call]:
            if result.leaf in attribute.places:
                attributes = found.setdefault(result.call, [])
                if attribute not in attributes:
                    attributes.append(attribute)
    return found


def _nothing() -> None:
    pass
