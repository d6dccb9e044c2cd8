"""Updates by themselves: the plain optimizer, given the run's own weights and gradients.

Gradients in a low precision are far from the reference's, and would hide a wrong update. So each
update of the run is held against the plain rule on the same numbers. The rule is also computed in
float64, and from gradients and settings moved by one unit in the last place. Their spread is what
passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from plait.models.parameters import Parameters
from plait.verify.record.compare import Difference, relative_error
from plait.verify.record.observation import Record, Tensors
from plait.verify.reference.one_device import Recipe
from plait.verify.reference.rounding import FACTOR, least_scale, moved, scale_error

SEEDS = (None, 0, 1)
"""Seeds that move the last places of gradients; None leaves them."""


def own_updates(record: Record, recipe: Recipe, dtype: torch.dtype) -> list[Difference]:
    """Parameters after every update, and the scale of the update, each with its own limit."""
    assert record.start is not None
    names = [name for name in record.start if _trains(record, name)]
    rule = _updated(record, names, recipe, torch.float64)
    others = [_updated(record, names, recipe, dtype, seed) for seed in SEEDS]
    differences = []
    for step, (right, *near) in enumerate(zip(rule, *others, strict=True)):
        before = record.before(step)
        seen = record.steps[step].params
        assert before is not None
        for name in names:
            old = before[name].double()
            way = right[name] - old
            error = relative_error(seen[name], right[name])
            spread = max(relative_error(one[name], right[name]) for one in near)
            limit = max(FACTOR * spread, torch.finfo(dtype).eps)
            differences.append(Difference(step, "param", name, error, limit=limit))
            if bool(way.any()):
                error = scale_error(seen[name].double() - old, way)
                spread = max(scale_error(one[name].double() - old, way) for one in near)
                rounded = least_scale(old, way, dtype)
                limit = max(FACTOR * spread, rounded)
                differences.append(Difference(step, "update", name, error, limit=limit))
    return differences


def _trains(record: Record, name: str) -> bool:
    return any(seen.grads.get(name) is not None for seen in record.steps)


def _updated(
    record: Record,
    names: Sequence[str],
    recipe: Recipe,
    dtype: torch.dtype,
    seed: int | None = None,
) -> list[Tensors]:
    """The parameters after each update by the plain rule in `dtype`."""
    assert record.start is not None
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    params = {name: nn.Parameter(record.start[name].to(dtype, copy=True)) for name in names}
    optimizer = recipe.optimizer(Parameters(list(params.items())))
    if generator is not None:
        _move_settings(optimizer, generator)
    rates = [group["lr"] for group in optimizer.param_groups]
    updates: list[Tensors] = []
    for step, seen in enumerate(record.steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * recipe.lr_factor(step)
        before = record.before(step)
        assert before is not None
        for name, param in params.items():
            grad = seen.grads.get(name)
            if grad is not None and generator is not None:
                grad = moved(grad, generator)
            param.data.copy_(before[name])
            param.grad = None if grad is None else grad.to(dtype, copy=True)
        optimizer.step()
        updates.append({name: param.detach().clone() for name, param in params.items()})
    return updates


def _move_settings(optimizer: Optimizer, generator: torch.Generator) -> None:
    """Rates, decays and moments' factors as a kernel that takes them in float32 may round them."""
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, float):
                group[key] = _last_place(value, generator)
            elif isinstance(value, tuple):
                group[key] = tuple(_last_place(float(one), generator) for one in value)


def _last_place(value: float, generator: torch.Generator) -> float:
    return float(moved(torch.tensor(value, dtype=torch.float32), generator))
