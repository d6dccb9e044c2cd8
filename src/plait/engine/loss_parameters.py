"""A warning where a loss has parameters of its own, which no step would train.

The engine trains the parameters of its model alone. A loop on one device trains those of a loss
too, if its optimizer has them. Such are the centres of classes, or the weights of several tasks.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.loss import LossFunction
from plait.engine.loss_reads import LossReads, OriginalParameters, is_of_a_library
from plait.engine.unchanged import is_of_an_engine
from plait.parallel.pipeline.held import held_tensors
from plait.torch_internals import is_recorded
from plait.values import PyTree


class LossParameters:
    """A loss function whose first graph is looked through for parameters of no model."""

    def __init__(
        self, function: LossFunction, model: nn.Module, originals: OriginalParameters
    ) -> None:
        self._function = function
        self._model = weakref.ref(model)
        self._originals = originals
        self._is_seen = False

    def __call__(self, output: PyTree, targets: PyTree) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of a micro-batch."""
        loss = self._function(output, targets)
        if not self._is_seen and not torch.compiler.is_compiling() and not is_recorded():
            value = loss[0] if isinstance(loss, tuple) else loss
            if isinstance(value, Tensor) and value.grad_fn is not None:
                self._is_seen = True
                self._look(value, output)
        return loss

    def _look(self, value: Tensor, output: PyTree) -> None:
        model = self._model()
        known = {id(param) for _, ref in self._originals if (param := ref()) is not None}
        if model is not None:
            known.update(map(id, model.parameters()))
        own = [
            param
            for param in _parameters_between(value, output)
            if id(param) not in known and not is_of_an_engine(param)
        ]
        if own:
            warnings.warn(
                f"the loss reads {len(own)} trainable parameters that the model does not have, "
                f"such as one of shape {list(own[0].shape)}, and no engine trains them: make their "
                "module a part of the model, whose forward returns what the loss needs of it; or "
                "freeze them by requires_grad_(False)",
                stacklevel=2,
            )


def watched(
    loss: LossFunction,
    model: nn.Module,
    originals: OriginalParameters,
    absent: Mapping[str, str],
    world: World,
) -> LossFunction:
    """A loss under watch for what it reads beside outputs and targets, unless a library has it.

    `absent` has a reason for each parameter that this rank does not hold whole.
    """
    if is_of_a_library(loss):
        return loss
    if absent:
        loss = LossReads(loss, model, originals, absent, world.axis("tp"))
    if world.worker[0] == world.axis("tp").rank == 0:
        loss = LossParameters(loss, model, originals)
    return loss


def _parameters_between(value: Tensor, output: PyTree) -> Iterator[nn.Parameter]:
    """The parameters that a loss [] was computed from beside the output of the model."""
    seen: set[object] = {one.grad_fn for one in held_tensors(output)}
    left = [value.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            yield leaf
        left.extend(following for following, _ in node.next_functions)
