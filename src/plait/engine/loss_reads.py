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
from plait.held import held_tensors
from plait.parallel.data.absent import only_describes
from plait.parallel.tensor.placement import Placement
from plait.plan import Plan
from plait.torch_internals import has_storage, uncompiled
from plait.values import PyTree

LIBRARIES = ("plait.", "torch.")
"""Modules whose losses read outputs and targets alone."""

NUM_COMPARED = 256
"""Values of a tensor that ranks compare, to see whether they hold the same one."""

CLOSE = 1e-3
"""The difference of such values, over the largest of them, that rounding may make."""

OriginalParameters = list[tuple[str, "weakref.ref[nn.Parameter]"]]
"""The parameters of a model before it is split, by name. They do not keep their memory."""

AbsentParameters = dict[int, tuple["weakref.ref[nn.Parameter]", str, str]]
"""The parameters that are not whole on a rank, by id: each with its name and a reason."""


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
    function = uncompiled(function)
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
        self._original = uncompiled(function)
        self._model = model
        self._originals = originals
        self._reasons = absent
        self._tensor = tensor
        self._absent: AbsentParameters | None = None
        self._compared = set[tuple[bool, bool]]()

    def __call__(self, output: PyTree, targets: PyTree) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of a micro-batch.

        The first call in training, as the first in an evaluation, compares activations over ranks.
        It is collective where there are any. They are the only ones of a compiled loss that are
        watched, as kernels are not looked into.

        Raises:
            ModelError: the loss reads a tensor that this rank does not hold whole.
        """
        if torch.compiler.is_compiling():
            return self._function(output, targets)
        if self._absent is None:
            self._absent = self._absent_parameters()
        mode = (self._model.training, torch.is_grad_enabled())
        if mode not in self._compared:
            self._compared.add(mode)
            with _FirstLossWatch(self._absent, [output, targets], self._tensor):
                return self._original(output, targets)
        if self._original is not self._function:
            return self._function(output, targets)
        with _LossWatch(self._absent, [output, targets]):
            return self._function(output, targets)

    def _absent_parameters(self) -> AbsentParameters:
        now = [(name, weakref.ref(param)) for name, param in self._model.named_parameters()]
        return {
            id(param): (ref, name, self._reasons[name])
            for name, ref in [*now, *self._originals]
            if name in self._reasons and (param := ref()) is not None
        }


class _LossWatch(TorchFunctionMode):
    """A watch over the functions of torch that a loss calls; no parameter of `absent` is read."""

    def __init__(self, absent: AbsentParameters, given: PyTree) -> None:
        super().__init__()
        self._absent = absent
        self._given = {id(tensor) for tensor in held_tensors(given)}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if torch.compiler.is_compiling():  # compiled code that the loss calls
            return function(*args, **named)
        if not only_describes(function):
            for leaf in tree_leaves((args, named)):
                if isinstance(leaf, Tensor) and id(leaf) not in self._given:
                    self.check(leaf)
        made = function(*args, **named)
        self.note(made)
        return made

    def note(self, made: PyTree) -> None:
        """A function of torch made these values."""

    def check(self, tensor: Tensor) -> None:
        """Raise `ModelError` for a tensor [...] that is an absent parameter."""
        ref, name, reason = self._absent.get(id(tensor), (None, "", ""))
        if ref is not None and ref() is tensor:
            raise ModelError(
                f"the loss reads the parameter '{name}', and {reason}; compute the penalty in the "
                "model's forward and return it with the output, or use the optimizer's weight_decay"
            )


class _FirstLossWatch(_LossWatch):
    """The watch that compares what the loss reads beside its arguments over the ranks of tp."""

    def __init__(self, absent: AbsentParameters, given: PyTree, axis: Axis) -> None:
        super().__init__(absent, given)
        self._axis = axis
        self._known = weakref.WeakValueDictionary[int, Tensor]()  # it keeps no memory

    def note(self, made: PyTree) -> None:
        """The values that the loss computes are known."""
        if self._axis.size > 1:
            self._known.update({id(one): one for one in tree_leaves(made) if _is_tensor(one)})

    def check(self, tensor: Tensor) -> None:
        """Raise `ModelError` also for a tensor [...] that differs over the ranks."""
        super().check(tensor)
        if self._axis.size == 1 or self._known.get(id(tensor)) is tensor:
            return
        self._known[id(tensor)] = tensor
        if not _is_comparable(tensor):
            return
        if not _is_same(self._axis.gather_objects(_sample(tensor))):
            raise ModelError(
                f"the loss reads a tensor {list(tensor.shape)} that is neither in the output nor "
                f"in the targets, and the {self._axis.size} ranks of tp hold other values or parts "
                "of it; return a tensor of the model's forward with the output, and seed others"
            )


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _is_comparable(tensor: Tensor) -> bool:
    """Whether a tensor [...] has real numbers in one memory, which those under `vmap` have not."""
    return tensor.is_floating_point() and has_storage(tensor)


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
