"""Give each rank of the expert axis its part of the experts, in place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from plait.comm import Axis
from plait.errors import ModelError
from plait.mesh.boxes import Box
from plait.models import packed_experts
from plait.models.experts import MixtureOfExperts
from plait.parallel.expert.dispatch import ExpertExchange
from plait.parallel.expert.route import AllToAllGroups


@dataclass(frozen=True)
class ExpertSplit:
    """By name: the box of each parameter on this rank, its whole shape, and the original modules of
    experts.
    """

    boxes: dict[str, Box]
    shapes: dict[str, tuple[int, ...]]
    originals: dict[str, nn.Module]


def apply(model: nn.Module, groups: AllToAllGroups) -> ExpertSplit:
    """Cut the parameters of all experts [E, ...] into equal parts along E, one a rank of the axis.
    Works on meta models.

    Raises `ModelError` for a model without experts, or a number of them that does not divide.
    """
    axis = groups.whole
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
    }
    packed = packed_experts.find(model)
    if not layers and not packed:
        raise ModelError(
            f"ep{axis.size} splits experts, and this model has none"
            f"{_unknown_experts(model)}; leave ep out or give it num_local_experts"
        )
    split = ExpertSplit({}, {}, {})
    for name, layer in layers.items():
        _check_divides(name, layer.router.settings.num_experts, axis)
        _cut(f"{name}.experts", layer.experts, axis, split)
        layer.exchange = ExpertExchange(groups)
    for name, experts in packed.items():
        _check_divides(name, experts.num_experts, axis)
        _cut(name, experts.module, axis, split, experts.keys)
        experts.keep(experts.num_experts // axis.size, ExpertExchange(groups))
    return split


def _check_divides(name: str, number: int, axis: Axis) -> None:
    if number % axis.size:
        raise ModelError(
            f"'{name}' has {number} experts, which ep{axis.size} does not divide; "
            f"choose a divisor of {number}"
        )


def _unknown_experts(model: nn.Module) -> str:
    """Names the first module of experts that computes something else than their sum."""
    for name, module in model.named_modules():
        if packed_experts.is_packed(module) or "Experts" in type(module).__name__:
            return f" that it knows ('{name}' is a {type(module).__name__})"
    return ""


def _cut(
    name: str, experts: nn.Module, axis: Axis, split: ExpertSplit, keys: Sequence[str] = ()
) -> None:
    """Cut the parameters `keys` of a module; all where none is given."""
    original = copy.copy(experts)
    original._parameters = dict(experts._parameters)
    reset = vars(experts).get("reset_parameters")
    if isinstance(reset, partial) and reset.args == (experts,):
        original.reset_parameters = partial(reset.func, original)  # type: ignore[assignment]
    split.originals[name] = original
    for key in keys or original._parameters:
        param = original._parameters[key]
        assert param is not None
        length = param.shape[0] // axis.size
        offset = (axis.rank * length, *(0 for _ in param.shape[1:]))
        shape = (length, *param.shape[1:])
        split.boxes[f"{name}.{key}"] = Box(offset, shape)
        split.shapes[f"{name}.{key}"] = tuple(param.shape)
        element = torch.zeros((), dtype=param.dtype, device=param.device)
        part = nn.Parameter(element.expand(shape), requires_grad=param.requires_grad)
        experts.register_parameter(key, part)
