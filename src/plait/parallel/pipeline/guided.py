"""Stages of a model that is no chain: each runs the model's own forward, and only its own units
compute.

The units of earlier stages return what was received for those results that are needed here or
later, and for the others place-holders of the right shape; at the first unit of a later stage the
forward is left. So the glue (masks, positions, rotary tables) is computed anew on every stage, and
what a unit made for several later ones (position biases, encoder states, skips) is carried along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from plait.errors import ModelError
from plait.parallel.pipeline.dataflow import Flow, Result
from plait.parallel.pipeline.payload import Payload, TensorForm, check_sendable
from plait.parallel.pipeline.random import get_state
from plait.parallel.pipeline.stage import StageModule


class _Left(Exception):
    """No error: the way out of a forward whose own part is done."""


@dataclass(frozen=True)
class _Template:
    """What a call returned: places in `leaves`, which are forms of tensors, or values that are no
    tensors.
    """

    skeleton: Any
    leaves: tuple[Any, ...]


@dataclass
class _Run:
    """One forward of one stage."""

    received: dict[Result, Tensor]
    templates: list[_Template]
    restore: Callable[[], None]
    call: int = 0
    made: dict[Result, Tensor] = field(default_factory=dict)
    random: Tensor | None = None  # where the own units have left the generator


@dataclass
class Guide:
    """The calls of a model and the stages that they belong to; shared by the stages of a rank, one
    of which runs at a time.
    """

    flow: Flow
    stage_of: Sequence[int]
    running: GuidedStage | None = None

    def install(self, model: nn.Module) -> None:
        """Let every unit ask who runs."""
        for name in dict.fromkeys(self.flow.calls):
            module = model.get_submodule(name)
            module.forward = self._guided(name, module.forward)

    def _guided(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            running = self.running
            return (
                forward(*args, **kwargs)
                if running is None
                else running.call(name, forward, args, kwargs)
            )

        return call


Swap = tuple[nn.Module, str, nn.Parameter]


class GuidedStage(StageModule):
    """One stage. `swaps` are parameters that another stage of this rank uses in the same modules,
    in a copy of its own.
    """

    def __init__(
        self, run: Callable[[Any], Any], guide: Guide, stage: int, swaps: Sequence[Swap] = ()
    ) -> None:
        self._model, self._guide, self._stage, self._swaps = run, guide, stage, list(swaps)
        stage_of = guide.stage_of
        flow = guide.flow
        own = [call for call, holder in enumerate(stage_of) if holder == stage]
        self._last_call = own[-1]
        self._is_last = stage == max(stage_of)
        self._arriving = flow.crossing(stage_of, stage - 1) if stage else ()
        self._leaving = () if self._is_last else flow.crossing(stage_of, stage)
        self._now: _Run | None = None

    def enter(self) -> None:
        """Put this stage's copies of shared parameters where the modules look for them."""
        for module, key, param in self._swaps:
            module._parameters[key] = param

    def forward(self, inputs: Any, received: Payload | None) -> Any:
        arrived = (
            {} if received is None else dict(zip(self._arriving, received.tensors, strict=True))
        )
        templates = [] if received is None else list(received.note)
        self._now = now = _Run(
            arrived, templates, received.restore if received is not None else _nothing
        )
        self.enter()
        self._guide.running = self
        try:
            output = self._model(inputs)
        except _Left:
            tensors = [
                now.received[result] if result in now.received else now.made[result]
                for result in self._leaving
            ]
            return Payload(tensors, tuple(now.templates), random=now.random)
        finally:
            self._guide.running = self._now = None
        if not self._is_last or now.call <= self._last_call:
            raise ModelError(
                f"the forward of the model ended after {now.call} of {len(self._guide.flow.calls)} calls that the example "
                "made; a pipeline needs a model that calls the same modules for every batch"
            )
        return output

    def call(
        self, name: str, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """A unit of the model is called in this stage's forward."""
        now = self._now
        guide = self._guide
        assert now is not None  # `running` is set only while there is a run
        number = now.call
        calls = guide.flow.calls
        if number >= len(calls) or calls[number] != name:
            expected = f"'{calls[number]}'" if number < len(calls) else "its end"
            raise ModelError(
                f"call {number} of the forward is '{name}' and was {expected} with the example; a pipeline needs a model that "
                "calls the same modules in the same order for every batch"
            )
        now.call += 1
        if number > self._last_call:
            raise _Left
        if guide.stage_of[number] < self._stage:
            now.restore()
            return self._stand_in(now, number)
        guide.running = None  # what a unit calls inside is its own affair
        try:
            output = forward(*args, **kwargs)
        finally:
            guide.running = self
        if not self._is_last:
            self._record(now, number, output)
        return output

    def _stand_in(self, now: _Run, number: int) -> Any:
        """What an earlier unit returned: the tensors that were received, and zeros for the rest.

        Glue that writes into a result does so here as it did there, so it gets memory of its own.
        """
        template = now.templates[number]
        written = self._guide.flow.written

        def value(place: int) -> Any:
            leaf = template.leaves[place]
            result = Result(number, place)
            if result in now.received:
                received = now.received[result]
                return received.clone() if result in written else received
            if not isinstance(leaf, TensorForm):
                return leaf
            if result in written:
                return torch.zeros(leaf.shape, dtype=leaf.dtype)
            return torch.zeros((), dtype=leaf.dtype).expand(leaf.shape)

        return tree_map(value, template.skeleton)

    def _record(self, now: _Run, number: int, output: Any) -> None:
        leaves, structure = tree_flatten(output)
        for place, leaf in enumerate(leaves):
            result = Result(number, place)
            if result in self._leaving:
                check_sendable(leaf, f"'{self._guide.flow.calls[number]}'")
                now.made[result] = leaf.clone() if result in self._guide.flow.written else leaf
        forms = tuple(TensorForm.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if number == self._last_call:
            now.random = get_state(
                next(
                    (leaf.device for leaf in leaves if isinstance(leaf, Tensor)),
                    torch.device("cpu"),
                )
            )
        now.templates.append(_Template(tree_unflatten(range(len(leaves)), structure), forms))


def _nothing() -> None:
    pass
