"""Give each rank of the expert axis its part of the experts, in place."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from plait.comm import Axis
from plait.errors import ModelError, NotAvailable
from plait.mesh.boxes import Box
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
    if not layers:
        raise ModelError(
            f"ep{axis.size} splits experts, and this model has none; "
            "leave ep out or give it num_local_experts"
        )
    split = ExpertSplit({}, {}, {})
    for name, layer in layers.items():
        number = layer.router.settings.num_experts
        if number % axis.size:
            raise ModelError(
                f"'{name}' has {number} experts, which ep{axis.size} does not divide; "
                f"choose a divisor of {number}"
            )
        _cut(f"{name}.experts", layer.experts, axis, split)
        layer.exchange = ExpertExchange(groups)
    return split


def _cut(name: str, experts: nn.Module, axis: Axis, split: ExpertSplit) -> None:
    original = copy.copy(experts)
    original._parameters = dict(experts._parameters)
    split.originals[name] = original
    for key, param in original._parameters.items():
        assert param is not None
        if not param.requires_grad:
            raise NotAvailable(
                f"'{name}.{key}' is frozen; "
                "experts that are not trained cannot be split over ep yet"
            )
        length = param.shape[0] // axis.size
        offset = (axis.rank * length, *(0 for _ in param.shape[1:]))
        shape = (length, *param.shape[1:])
        split.boxes[f"{name}.{key}"] = Box(offset, shape)
        split.shapes[f"{name}.{key}"] = tuple(param.shape)
        element = torch.zeros((), dtype=param.dtype, device=param.device)
        experts.register_parameter(key, nn.Parameter(element.expand(shape)))
