"""Updates by themselves: the plain optimizer, given the run's own weights and gradients.

Gradients in a low precision are far from the reference's, and would hide a wrong update. So each
update of the run is held against the plain rule on these numbers. It is computed in float64 and in
the run's precision. What lies between the two is right: squares may underflow in one of them alone.
Beyond them passes what one unit in the last place of gradients and settings does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plait import torch_internals
from plait.models.parameters import Parameters
from plait.verify.record.compare import Difference, relative_error
from plait.verify.record.observation import Record, Tensors
from plait.verify.reference.recipe import Recipe
from plait.verify.reference.rounding import FACTOR, least_scale, moved

SEEDS = (None, 0, 1)
"""Seeds that move the last places of gradients; None leaves them."""


def own_updates(record: Record, recipe: Recipe, dtype: torch.dtype) -> list[Difference]:
    """Parameters after every update, and the scale of the update, each with its own limit."""
    assert record.start is not None
    names = trained(record)
    rule = updated(record, names, recipe, torch.float64)
    others = [updated(record, names, recipe, dtype, seed) for seed in SEEDS]
    differences = []
    for step, (exact, plain, *moved_rules) in enumerate(zip(rule, *others, strict=True)):
        before = record.before(step)
        assert before is not None
        for name in names:
            seen = record.steps[step].params[name]
            near = [one[name] for one in moved_rules]
            error = relative_error(seen, _nearest(seen, exact[name], plain[name]))
            spread = max(relative_error(one, plain[name]) for one in near)
            limit = max(FACTOR * spread, torch.finfo(dtype).eps)
            differences.append(Difference(step, "param", name, error, limit=limit))
            old = before[name].double()
            way = exact[name] - old
            if bool(way.any()):
                own, rounded, *others_ = (
                    _scale(one, old, way) for one in (seen, plain[name], *near)
                )
                error = abs(own - min(max(own, min(1.0, rounded)), max(1.0, rounded)))
                spread = max(abs(one - rounded) for one in others_)
                limit = max(FACTOR * spread, least_scale(old, way, dtype))
                differences.append(Difference(step, "update", name, error, limit=limit))
    return differences


def _nearest(seen: Tensor, exact: Tensor, plain: Tensor) -> Tensor:
    """The value nearest to the run's between the rule in float64 and in the run's precision.

    A kernel may round a state before it is used or after, or keep it in float32.
    """
    ends = exact.double(), plain.double()
    return seen.double().clamp(torch.minimum(*ends), torch.maximum(*ends))


def _scale(value: Tensor, old: Tensor, way: Tensor) -> float:
    """How many times `way` the value has moved from the old one."""
    return float(((value.double() - old) * way).sum() / way.square().sum())


def trained(record: Record) -> list[str]:
    """The names of the parameters that have a gradient in some step."""
    return [name for name in record.start or () if _trains(record, name)]


def _trains(record: Record, name: str) -> bool:
    return any(seen.grads.get(name) is not None for seen in record.steps)


def updated(
    record: Record,
    names: Sequence[str],
    recipe: Recipe,
    dtype: torch.dtype,
    seed: int | None = None,
) -> list[Tensors]:
    """The parameters [...] after each update by the plain rule in `dtype`, each from the record's
    own before it. With a seed, gradients and settings move by their last place.
    """
    assert record.start is not None
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    params = {name: nn.Parameter(record.start[name].to(dtype, copy=True)) for name in names}
    optimizer = recipe.made(Parameters(list(params.items())))
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
        torch_internals.step(optimizer)
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
