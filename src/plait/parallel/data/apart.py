"""Does an optimizer update each parameter by itself? Found out by trying it.

A stage of a pipeline, a server and an owner of whole tensors update some of the parameters. A norm
over all of them, by which an optimizer clips or finds its rate, would be another number there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait import torch_internals
from plait.errors import OptimizerError
from plait.parallel.data.elementwise import MakeOptimizer, begin_training, without_graphs
from plait.parallel.data.trial import (
    TINY,
    TRIES,
    begun,
    fill,
    gradients,
    group_of,
    is_elementwise_of_torch,
    raise_rates,
    two_of_each,
)
from plait.random_state import drawn_alone

_FACTOR = 1e3


def require_apart(make_optimizer: MakeOptimizer, plan_text: str, count: int = 1) -> None:
    """Raise `OptimizerError` where the update of a parameter depends on other parameters.

    `make_optimizer` is tried on the CPU, on `count` parameters (4, 6). Then some of these get
    larger gradients, of no steady direction. All have gradients for three steps. In another trial
    two of each group have some for more steps. One that does not take them, or draws other numbers
    in each trial, is not looked at. torch's own elementwise optimizers have the first trial alone.
    """
    for few in (False, True):
        found = _compared(make_optimizer, count, few=few)
        if found.depends:
            raise OptimizerError(
                f"{found.name} updates a parameter by the gradients of others, as by a norm over "
                f"all of them, and a rank under {plan_text} updates its own alone. Use "
                "dpN:allreduce or ring without tpN, ppN and epN, or an optimizer without it; to "
                "clip by the norm of all gradients is options=plait.Options(clip_grad_norm=...)"
            )
        if found.is_of_torch:
            return


class _Compared(NamedTuple):
    """An optimizer's name, whether others count for a parameter, and whether torch made it so."""

    name: str
    depends: bool
    is_of_torch: bool


def _compared(make_optimizer: MakeOptimizer, count: int, *, few: bool) -> _Compared:
    """Three trials, of which the last has other gradients."""
    for way in TRIES:
        try:
            with torch_internals.without_compiling():
                optimizer, first = _tried(make_optimizer, count, way, few=few)
                _, again = _tried(make_optimizer, count, way, few=few)
                _, others = _tried(make_optimizer, count, way, few=few, factor=_FACTOR)
        except Exception:  # a real step says what it is
            continue
        name = type(getattr(optimizer, "inner", optimizer)).__name__
        depends = _are_equal(first, again) and not _are_equal(first, others)
        return _Compared(name, depends, is_elementwise_of_torch(optimizer))
    return _Compared("", depends=False, is_of_torch=False)


def _tried(
    make_optimizer: MakeOptimizer,
    count: int,
    way: tuple[torch.dtype, bool],
    *,
    few: bool,
    factor: float | None = None,
) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """The optimizer, and what comes of every other parameter of each group, where the rest
    may have other gradients.
    """
    dtype, fills = way
    shapes = [TINY] * count
    params = [nn.Parameter(start) for start in begun(shapes, dtype)]
    noise = torch.Generator().manual_seed(2)
    with drawn_alone(0):
        optimizer = make_optimizer(params)
        begin_training(optimizer)
        without_graphs(optimizer)
        watched = {
            id(param)
            for number, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
            if (number + index) % 2 == 0
        }
        moved = two_of_each(group_of(optimizer, params)) if few else set(range(count))
        if few:
            raise_rates(optimizer)
        if fills:
            fill(params, moved)
        for grads in gradients(shapes, dtype, steady=few):
            for index in moved:
                param = params[index]
                param.grad = grads[index]
                if factor is not None and id(param) not in watched:
                    param.grad = factor * torch.randn(*TINY, generator=noise, dtype=dtype)
            torch_internals.step(optimizer)
    return optimizer, [one.detach() for one in params if id(one) in watched]


def _are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.allclose(one, two, rtol=0, atol=0, equal_nan=True) for one, two in pairs)
