"""Losses that read more than outputs and targets.

A penalty reads parameters, or activations that blocks kept in attributes. Data parallelism has both
whole on every rank. Tensor, expert and pipeline parallelism hold them in parts, or on other ranks.
Such a loss would be another one there.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plait.comm import Axis
from plait.engine.loss import LossFunction
from plait.errors import ModelError
from plait.parallel.data.freed import only_describes
from plait.parallel.pipeline.held import held_tensors
from plait.parallel.tensor.placement import Placement
from plait.plan import Plan
from plait.values import PyTree

LIBRARIES = ("plait.", "torch.")
"""Modules whose losses read outputs and targets alone."""

NUM_COMPARED = 256
"""Values of a tensor that ranks compare, to see whether they hold the same one."""

CLOSE = 1e-3
"""The difference of such values, over the largest of them, that rounding may make."""

OriginalParameters = list[tuple[str, "weakref.ref[nn.Parameter]"]]
"""The parameters of a model before it is split, by name. They do not keep their memory."""


def original_parameters(model: nn.Module) -> OriginalParameters:
    """The parameters that a loss may have been given before a build."""
    return [(name, weakref.ref(param)) for name, param in model.named_parameters()]


def absent_parameters(
    names: Collection[str],
    plan: Plan,
    last_stage: Collection[str],
    placements: Mapping[str, Placement],
) -> dict[str, str]:
    """Why parameters are not whole on the ranks of the last stage, by their names."""
    absent = {}
    for name in names:
        placement = placements.get(name)
        if plan.tp.size > 1:
            absent[name] = f"tp{plan.tp.size} holds parameters in parts"
        elif name not in last_stage:
            absent[name] = "another stage of pp holds it"
        elif placement is not None and placement.local_shape != placement.shape:
            absent[name] = f"ep{plan.ep} holds experts in parts"
    return absent


def is_of_a_library(function: Callable[..., object]) -> bool:
    """Whether a loss is known to read outputs and targets alone."""
    home = getattr(function, "__module__", None) or type(function).__module__
    return f"{home}.".startswith(LIBRARIES)


class LossReads:
    """A loss function that refuses to read what this rank does not hold whole.

    `absent` has a reason for each parameter by name, such as "tp2 holds parameters in parts".
    `tensor` is the axis whose ranks may hold parts of an activation.
    """

    def __init__(
        self,
        function: LossFunction,
        model: nn.Module,
        originals: OriginalParameters,
        absent: Mapping[str, str],
        tensor: Axis,
    ) -> None:
        self._function = function
        self._model = model
        self._originals = originals
        self._absent = absent
        self._tensor = tensor
        self._is_known = False
        self._is_compiled = hasattr(function, "_torchdynamo_orig_callable")

    def __call__(self, output: PyTree, targets: PyTree) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of a micro-batch.

        The first call compares activations over ranks, and is collective where there are any. It is
        the only one of a compiled loss that is watched, as a watch breaks its graph.

        Raises:
            ModelError: the loss reads a tensor that this rank does not hold whole.
        """
        if torch.compiler.is_compiling() or (self._is_known and self._is_compiled):
            return self._function(output, targets)
        compared = None if self._is_known else self._tensor
        self._is_known = True
        with _LossWatch(self._reasons(), [output, targets], compared):
            return self._function(output, targets)

    def _reasons(self) -> dict[int, tuple[str, str]]:
        """The name and the reason of each parameter that is not whole here, by id."""
        now = [(name, param) for name, param in self._model.named_parameters()]
        before = [(name, param) for name, ref in self._originals if (param := ref()) is not None]
        return {
            id(param): (name, self._absent[name])
            for name, param in [*now, *before]
            if name in self._absent
        }


class _LossWatch(TorchFunctionMode):
    """A watch over the functions of torch that a loss calls."""

    def __init__(
        self, absent: Mapping[int, tuple[str, str]], given: PyTree, compared: Axis | None
    ) -> None:
        super().__init__()
        self._absent = absent
        self._compared = compared
        self._known = {id(tensor): tensor for tensor in held_tensors(given)}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if not only_describes(function):
            for leaf in tree_leaves((args, named)):
                if isinstance(leaf, Tensor) and id(leaf) not in self._known:
                    self._check(leaf)
        made = function(*args, **named)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._known[id(leaf)] = leaf
        return made

    def _check(self, tensor: Tensor) -> None:
        if id(tensor) in self._absent:
            name, reason = self._absent[id(tensor)]
            raise ModelError(
                f"the loss reads the parameter '{name}', and {reason}; compute the penalty in the "
                "model's forward and return it with the output, or use the optimizer's weight_decay"
            )
        self._known[id(tensor)] = tensor
        axis = self._compared
        if axis is None or axis.size == 1 or not tensor.is_floating_point():
            return
        if not _is_same(axis.gather_objects(_sample(tensor))):
            raise ModelError(
                f"the loss reads a tensor {list(tensor.shape)} that the model's forward made and "
                f"did not return, and the {axis.size} ranks of tp hold other parts of it; "
                "return it with the output"
            )


def _sample(tensor: Tensor) -> tuple[tuple[int, ...], list[float]]:
    """The shape of a tensor [...], and some of its values."""
    with torch._C.DisableTorchFunction():
        flat = tensor.detach().reshape(-1)
        step = max(1, math.ceil(flat.numel() / NUM_COMPARED))
        return tuple(tensor.shape), flat[::step].double().tolist()


def _is_same(samples: list[tuple[tuple[int, ...], list[float]]]) -> bool:
    shape, values = samples[0]
    if not all(math.isfinite(value) for _, values in samples for value in values):
        return all(other_shape == shape for other_shape, _ in samples)
    largest = max(map(abs, values), default=0.0)

    def is_close(others: list[float]) -> bool:
        return all(abs(a - b) <= CLOSE * largest for a, b in zip(values, others, strict=True))

    return all(other == shape and is_close(others) for other, others in samples[1:])
