"""A warning where a loss has parameters of its own, and a refusal where a scaler multiplied it.

The engine trains the parameters of its model alone. A loop on one device trains those of a loss
too, if its optimizer has them. Such are the centres of classes, or the weights of several tasks.
Such a loop also divides the gradients by the scale of a `GradScaler`, which no engine does.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import Node

from plait.comm import World
from plait.engine.loss import LossFunction
from plait.engine.loss_reads import LossReads, OriginalParameters, is_of_a_library
from plait.engine.unchanged import is_of_an_engine
from plait.errors import ModelError
from plait.held import held_tensors
from plait.torch_internals import has_storage, is_recorded, storage_of
from plait.values import PyTree


class LossParameters:
    """A loss function whose first graph is looked through for parameters of no model.

    The scale of a `GradScaler` in it is refused on every rank. One rank `warns` of parameters.
    """

    def __init__(
        self,
        function: LossFunction,
        model: nn.Module,
        originals: OriginalParameters,
        warns: bool,
    ) -> None:
        self._function = function
        self._model = weakref.ref(model)
        self._originals = originals
        self._warns = warns
        self._is_seen = False

    def __call__(self, output: PyTree, targets: PyTree) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of a micro-batch.

        Raises:
            ModelError: a `GradScaler` has multiplied it.
        """
        loss = self._function(output, targets)
        if not self._is_seen and not torch.compiler.is_compiling() and not is_recorded():
            value = loss[0] if isinstance(loss, tuple) else loss
            if isinstance(value, Tensor) and value.grad_fn is not None:
                self._is_seen = True
                nodes = list(_nodes_between(value, output))
                _refuse_scaler(nodes)
                if self._warns:
                    self._warn(nodes)
        return loss

    def _warn(self, nodes: list[Node]) -> None:
        model = self._model()
        known = {id(param) for _, ref in self._originals if (param := ref()) is not None}
        if model is not None:
            known.update(map(id, model.parameters()))
        own = [
            param
            for node in nodes
            if isinstance(param := getattr(node, "variable", None), nn.Parameter)
            and id(param) not in known
            and not is_of_an_engine(param)
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
    warns = world.worker[0] == world.axis("tp").rank == 0
    return LossParameters(loss, model, originals, warns)


def _nodes_between(value: Tensor, output: PyTree) -> Iterator[Node]:
    """The graph that a loss [] was computed by beside the output of the model."""
    seen: set[object] = {one.grad_fn for one in held_tensors(output)}
    left = [value.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        left.extend(following for following, _ in node.next_functions)


def _refuse_scaler(nodes: list[Node]) -> None:
    """Raise `ModelError` for a product with the scale that a `GradScaler` keeps."""
    factors = [
        storage_of(factor)
        for node in nodes
        if node.name() == "MulBackward0"
        and isinstance(factor := getattr(node, "_saved_other", None), Tensor)
        and factor.dim() == 0
        and has_storage(factor)
        and factor.dtype == torch.float32  # that of a number of Python is float64
    ]
    if not factors:
        return
    scalers = [one for one in gc.get_objects() if issubclass(type(one), GradScaler)]
    for scale in [one._scale for one in scalers if one._scale is not None]:
        if storage_of(scale) in factors:
            raise ModelError(
                f"a GradScaler multiplies the loss by {scale.item():g}, and an engine never "
                "divides its gradients by that; drop the scaler, and choose precision:bf16 in the "
                "plan or options=plait.Options(float16=True), which scales the loss itself"
            )
