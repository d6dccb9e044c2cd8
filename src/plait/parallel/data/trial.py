"""Steps of an optimizer on a few values, by which plait finds out what it looks at."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn, optim

from plait.torch_internals import has_own_step

TINY = (4, 6)
STEPS_OF_ALL = 3
STEPS_OF_FEW = 14
"""A trial on all parameters has few steps. One on some of them has more, with steady gradients."""

PRECISIONS = (torch.float64, torch.float32)
"""Precisions of trials: a small rate shows in the first; some optimizers know the second alone."""

ELEMENTWISE: Final = frozenset(
    {
        *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.ASGD),
        *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop),
    }
)
"""torch's own optimizers whose formulas have one element of one parameter each."""

TRIES = tuple((dtype, fills) for fills in (False, True) for dtype in PRECISIONS)
"""The trials until an optimizer takes one: the precision, and whether all parameters have
gradients. Some optimizers read the gradient of each parameter without asking for one."""

_NOISE = 0.3
_SMALL = 0.1
_SMALL_STEPS = 2


def begun(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """The values [...] that a trial begins with, of these shapes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes]


def gradients(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, *, steady: bool
) -> Iterator[list[Tensor]]:
    """The gradients [...] of each step, of these shapes: noise, or a direction with some noise.

    An optimizer that finds its own rate, as Prodigy, goes on in a steady direction alone. AdaShift
    begins to move after ten steps. AdaNorm acts where gradients become smaller, as the last two do.
    """
    generator = torch.Generator().manual_seed(1)
    means = [torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes]
    for step in range(STEPS_OF_FEW if steady else STEPS_OF_ALL):
        noise = [torch.randn(*mean.shape, generator=generator, dtype=dtype) for mean in means]
        if not steady:
            yield noise
            continue
        size = 1.0 if step < STEPS_OF_FEW - _SMALL_STEPS else _SMALL
        yield [size * (mean + _NOISE * one) for mean, one in zip(means, noise, strict=True)]


def fill(params: Sequence[nn.Parameter], moved: Collection[int]) -> None:
    """Give zeros as gradients to parameters other than those `moved`."""
    for index, param in enumerate(params):
        if index not in moved:
            param.grad = torch.zeros_like(param)


def raise_rates(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer go far in a few steps, as rates that warm up from 0 do later."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is not None and rate < 1.0:
            group["lr"] = torch.ones_like(rate) if isinstance(rate, Tensor) else 1.0


def group_of(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> list[int]:
    """The number of the group of each parameter; -1 in none."""
    known = {
        id(param): number
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    return [known.get(id(param), -1) for param in params]


def two_of_each(groups: Sequence[int]) -> set[int]:
    """The places of the first two parameters of each group."""
    places: dict[int, list[int]] = {}
    for at, group in enumerate(groups):
        places.setdefault(group, []).append(at)
    return {at for own in places.values() for at in own[:2]}


def is_elementwise_of_torch(optimizer: optim.Optimizer) -> bool:
    """Whether an optimizer is one of `ELEMENTWISE`, without a hook or another step.

    A short trial is enough for it, so that a build takes no longer.
    """
    return type(optimizer) in ELEMENTWISE and has_own_step(optimizer)
