"""One stage of a model: forward on inputs or on what was received, and backward, whole or in two
halves.

    module.forward inputs or received tensors -> what is sent on, or the model's output
    keep           the graph of a forward, for its backward
    backward       gradients of what was sent -> gradients of what was received, weight gradients on
    the way
    input_grad     the same, but the large weight gradients are left for `weight_grad`

What is sent keeps no memory here: of an output only its place in the graph is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from plait.parallel.pipeline.payload import Payload
from plait.parallel.pipeline.weight_grad_store import (
    WeightGradStore,
    WeightGradTasks,
)


class StageModule(ABC):
    """The part of a model that a stage runs."""

    @abstractmethod
    def forward(self, inputs: Any, received: Payload | None) -> Any:
        """`inputs` are those of the whole model; `received` is None on the first stage.

        Returns a Payload, or on the last stage the output of the model.
        """

    def enter(self) -> None:  # most stages share no module with another  # noqa: B027
        """A backward begins, which may run parts of the forward again: they must find this stage's
        parameters.
        """


@dataclass
class _Live:
    """The state of a micro-batch between its forward and its backward."""

    received: list[Tensor]
    roots: list[GradientEdge] = field(default_factory=list)
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

    def keep(self, micro_batch: int, received: Payload | None, outputs: Sequence[Tensor]) -> None:
        """Remember the graph of a forward of `module`: from what was received to its outputs.

        The outputs are the tensors that are sent on; on the last stage, the loss.
        """
        live = _Live([] if received is None else received.tensors)
        live.roots = [get_gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
        self._live[micro_batch] = live
        self.peak_live = max(self.peak_live, len(self._live))

    def backward(self, micro_batch: int, grads: Sequence[Tensor] | None) -> list[Tensor]:
        """From the gradients of what was sent (None: the loss) to those of what was received and
        wants one.
        """
        live = self._live.pop(micro_batch)
        return self._run(live, grads)

    def input_grad(self, micro_batch: int, grads: Sequence[Tensor] | None) -> list[Tensor]:
        """`backward` without the weight gradients that can wait, which `weight_grad` computes."""
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

    def _run(self, live: _Live, grads: Sequence[Tensor] | None) -> list[Tensor]:
        self.module.enter()
        if live.roots:
            torch.autograd.backward(live.roots, None if grads is None else list(grads))
        leaves = [tensor for tensor in live.received if tensor.requires_grad]
        live.roots = []
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
