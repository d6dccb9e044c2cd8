"""One stage of a model: forward on inputs or on what was received, and backward, whole or in two
halves.

    module.forward inputs or received tensors -> what is sent on, or the model's output
    keep           the graph of a forward, for its backward
    backward       gradients of what was sent -> gradients of what was received, weight gradients
                   on the way
    input_grad     the same, but the large weight gradients are left for `weight_grad`

What is sent keeps no memory here: of an output only its place in the graph is kept.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from plait.parallel.pipeline.elsewhere import LinkAttributes
from plait.parallel.pipeline.payload import Payload, pack, unpack
from plait.parallel.pipeline.weight_grad_store import (
    WeightGradStore,
    WeightGradTasks,
)
from plait.values import PyTree

Arguments = Callable[[PyTree], tuple[Sequence[object], Mapping[str, object]]]


class StageModule(ABC):
    """The part of a model that a stage runs."""

    @abstractmethod
    def forward(self, inputs: object, received: Payload | None) -> PyTree:
        """`inputs` are those of the whole model; `received` is None on the first stage.

        Returns a Payload, or on the last stage the output of the model.
        """

    def enter(self) -> None:  # most stages share no module with another  # noqa: B027
        """A backward begins, which may run parts of the forward again: they must find this stage's
        parameters.
        """


class WholeModel(StageModule):
    """The only stage: the model as it is. `arguments(inputs)` are those of its forward."""

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        self._model = model
        self._arguments = arguments

    def forward(self, inputs: object, received: Payload | None) -> PyTree:
        positional, named = self._arguments(inputs)
        return self._model(*positional, **named)


class ChainStage(StageModule):
    """A run of links. `call(link, inputs)` runs the first link of the model on the model's inputs.

    Inputs that the first link does not take go to every link that does, as documents of
    packed sequences. They do not travel: each stage has the inputs of its micro-batches.

    Nor do tensors that links leave in attributes: `attributes` lets other stages refuse to read
    them.
    """

    def __init__(
        self,
        links: Sequence[tuple[str, nn.Module]],
        call: Callable[[nn.Module, Any], object],
        *,
        last: bool,
        attributes: LinkAttributes,
        names: Sequence[str] = (),
        first: nn.Module | None = None,
    ) -> None:
        """`names` of the inputs of the whole model; `first` is its first link."""
        self._links, self._call, self._last, self._names = list(links), call, last, tuple(names)
        self._taken = () if first is None else _parameters(first)
        self._beside = {name: _parameters(link) for name, link in self._links}
        self._attributes = attributes

    def forward(self, inputs: object, received: Payload | None) -> PyTree:
        if received is not None:
            received.restore()
            received = self._attributes.take_names(received)
        with self._attributes.watched():
            value = self._run(inputs, received)
        if self._last:
            return value
        return self._attributes.add_names(pack(value, f"'{self._links[-1][0]}'"))

    def _run(self, inputs: object, received: Payload | None) -> PyTree:
        links, (own, beside) = iter(self._links), self._apart(inputs)
        value = self._call(next(links)[1], own) if received is None else unpack(received)
        for name, link in links:
            value = link(value, **{key: beside[key] for key in self._beside[name] if key in beside})
        return value

    def _apart(self, inputs: object) -> tuple[object, dict[str, object]]:
        """The inputs of the first link, and those of the others by name."""
        if isinstance(inputs, tuple | list):
            named = dict(zip(self._names, inputs, strict=False))
        elif isinstance(inputs, Mapping):
            named = dict(inputs)
        else:
            return inputs, {}
        beside = {
            name: value
            for name, value in named.items()
            if name in self._names[1:] and name not in self._taken
        }
        if not beside:
            return inputs, {}
        own = tuple(value for name, value in named.items() if name not in beside)
        return own, beside


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """Names of what a module's own forward takes, whatever has been wrapped round it."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


@dataclass
class _Live:
    """The state of a micro-batch between its forward and its backward."""

    received: list[Tensor]
    roots: list[GradientEdge] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)  # the places among them of such numbers
    deferred: WeightGradTasks | None = None


class Stage:
    """A stage module and its micro-batches under way."""

    def __init__(
        self, module: StageModule, index: int, weight_grads: WeightGradStore | None = None
    ) -> None:
        self.module = module
        self.index = index
        self._weight_grads = weight_grads
        self._live: dict[int, _Live] = {}
        # Weight gradients that are computed together with those of the next micro-batch.
        self._waiting: WeightGradTasks | None = None
        self.peak_live = 0

    def keep(
        self,
        micro_batch: int,
        received: Payload | None,
        outputs: Sequence[Tensor],
        unread: frozenset[int] = frozenset(),
    ) -> None:
        """Remember the graph of a forward of `module`: from what was received to its outputs.

        The outputs are the tensors [...] that are sent on; on the last stage, the loss (0-dim).
        `unread` are the places of those that at most the loss reads.
        """
        live = _Live([] if received is None else received.tensors)
        places = [place for place, tensor in enumerate(outputs) if tensor.requires_grad]
        live.roots = [get_gradient_edge(outputs[place]) for place in places]
        live.unread = [root for root, place in enumerate(places) if place in unread]
        self._live[micro_batch] = live
        self.peak_live = max(self.peak_live, len(self._live))

    def backward(
        self, micro_batch: int, grads: Sequence[Tensor | None] | None
    ) -> list[Tensor | None]:
        """From the gradients of what was sent (None: the loss) to those of what was received and
        wants one.

        Each gradient has the shape of its tensor, in the order of the payload. It is None where no
        loss depends on the tensor.
        """
        live = self._live.pop(micro_batch)
        return self._run(live, grads)

    def input_grad(
        self, micro_batch: int, grads: Sequence[Tensor | None] | None
    ) -> list[Tensor | None]:
        """`backward` without the weight gradients that can wait, which `weight_grad` computes. Each
        gradient has the shape of its tensor.
        """
        live = self._live[micro_batch]
        if self._weight_grads is None:
            return self._run(live, grads)
        with self._weight_grads.collect() as live.deferred:
            received_grads = self._run(live, grads)
        live.received = []
        live.roots = []
        return received_grads

    def weight_grad(self, micro_batch: int, *, later: bool = False) -> None:
        """The weight gradients that `input_grad` has left; with `later` they are made by the next
        call, as one with its own.
        """
        deferred = self._live.pop(micro_batch).deferred
        if deferred is None:
            return
        if self._waiting is not None:
            deferred.take(self._waiting)
        self._waiting = deferred if later else None
        if not later:
            deferred.run()

    def _run(self, live: _Live, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        self.module.enter()
        there = None
        if grads is not None:
            live.roots, there = _of_read(live, grads)
        if live.roots:
            torch.autograd.backward(live.roots, there)
        leaves = [tensor for tensor in live.received if tensor.requires_grad]
        live.roots = []
        return [leaf.grad for leaf in leaves]


def _of_read(
    live: _Live, grads: Sequence[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """The roots and their gradients [...] without those that no loss has read.

    A number that at most a loss reads may have a gradient of zero. Its graph may hold an infinite
    slope, and the product is no number.
    """
    numbers = {root: grad for root in live.unread if (grad := grads[root]) is not None}
    dropped = set[int]()
    if numbers:
        has_gradient = torch.stack([grad.any() for grad in numbers.values()]).tolist()
        dropped = {root for root, has in zip(numbers, has_gradient, strict=True) if not has}
    roots, there = [], []
    for place, (root, grad) in enumerate(zip(live.roots, grads, strict=True)):
        if grad is not None and place not in dropped:
            roots.append(root)
            there.append(grad)
    return roots, there
