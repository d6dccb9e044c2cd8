"""A function that makes optimizers like one that the user made for the whole model.

A rank's parameters are parts of the model's. So the optimizer is rebuilt for them, of its class and
with the settings of its groups.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from plait.errors import OptimizerError
from plait.models.parameters import Parameters
from plait.values import JsonMapping, JsonObject


def like(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, follows_schedule: bool = False
) -> Callable[[Parameters], torch.optim.Optimizer]:
    """The function for `build`. Raises `OptimizerError` where the optimizer has been used or leaves
    parameters out, or where its schedule of rates is not followed.
    """
    kind: Any = type(optimizer)
    cure = f"give build a function, optimizer=lambda params: {kind.__name__}(params, ...)"
    if optimizer.state:
        raise OptimizerError(
            f"the {kind.__name__} has made steps already, and its state cannot be split; {cure}"
        )
    has_schedule = any("initial_lr" in group for group in optimizer.param_groups)
    if has_schedule and not follows_schedule:
        raise OptimizerError(
            f"the {kind.__name__} has a schedule of learning rates, which would move nothing; "
            "leave "
            "it out and give options=plait.Options(learning_rate=factor_of_step)"
        )
    groups = [_settings(kind, group) for group in optimizer.param_groups]
    group_of = _group_of(optimizer, model)
    missing = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and name not in group_of
    ]
    if missing:
        raise OptimizerError(
            f"the {kind.__name__} leaves out {len(missing)} of the model's parameters, as "
            f"{missing[0]}; freeze them with requires_grad_(False), or {cure}"
        )

    def make(params: Parameters) -> torch.optim.Optimizer:
        members: list[list[nn.Parameter]] = [[] for _ in groups]
        for name, param in params.named():
            members[group_of.get(name, 0)].append(param)
        made = [{"params": own, **settings} for own, settings in zip(members, groups, strict=True)]
        result: torch.optim.Optimizer = kind(made)
        return result

    return make


def _settings(kind: Any, group: JsonMapping) -> JsonObject:
    """The settings of a group that the optimizer's constructor takes."""
    taken = inspect.signature(kind.__init__).parameters
    return {key: value for key, value in group.items() if key in taken and key != "params"}


def _group_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    """The group of each of the model's parameters, by name."""
    index_of = {
        id(param): index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    return {
        name: index_of[id(param)]
        for name, param in model.named_parameters()
        if id(param) in index_of
    }
