"""Is an optimizer elementwise? Found out by trying it, so that a user's own optimizer needs no
entry in a list.

A ZeRO shard is a range of elements that begins and ends inside parameters. A tensor axis gives
each rank a box. An optimizer that looks at a whole tensor (a norm, a factored second moment) would
silently compute something else. So it is refused before it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from plait import torch_internals
from plait.errors import OptimizerError

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

CURE = (
    "Use an elementwise optimizer (SGD, Adam, AdamW, ...), plait.WholeTensors(function of the "
    "parameters), one that says needs_whole = True, or dpN:allreduce, ring or server without tpN"
)

SHARPNESS_STEPS = ("first_step", "second_step")
"""The halves of a step of SAM (Foret et al. 2021), whose closure is None by default."""

_ROWS = 4
_COLUMNS = 6
_CUT = 10
_STEPS = 3


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raise `OptimizerError` for an optimizer that computes the loss again in its step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    in_two = all(callable(getattr(optimizer, name, None)) for name in SHARPNESS_STEPS)
    if in_two or (closure is not None and closure.default is closure.empty):
        raise OptimizerError(
            f"{type(optimizer).__name__}.step(closure) computes the loss again within a step, and "
            "plait makes one forward and backward for each; use an optimizer whose step takes no "
            "closure, such as AdamW"
        )


def require_elementwise(make_optimizer: MakeOptimizer, plan_text: str, count: int = 1) -> None:
    """Raise `OptimizerError` unless the optimizer updates matrices and their two halves alike.

    Each half has an optimizer of its own.

    `make_optimizer` is tried for three steps on the CPU: on `count` parameters (4, 6), and on as
    many of (10,) and (14,).
    """
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in range(count)]
    whole = [nn.Parameter(start.clone()) for start in starts]
    halves = [[nn.Parameter(_halves(start)[k].clone()) for start in starts] for k in range(2)]
    name = "the optimizer"
    try:
        optimizers = [make_optimizer(params) for params in (whole, *halves)]
        name = type(optimizers[0]).__name__
        refuse_closures(optimizers[0])
        for optimizer in optimizers:
            begin_training(optimizer)
            for group in optimizer.param_groups:
                if "capturable" in group:  # CUDA graphs ask for it, and a CPU refuses it
                    group["capturable"] = False
        for _ in range(_STEPS):
            for index, param in enumerate(whole):
                param.grad = torch.randn(_ROWS, _COLUMNS, generator=generator)
                for half, part in zip(halves, _halves(param.grad), strict=True):
                    half[index].grad = part.clone()
            for optimizer in optimizers:
                torch_internals.step(optimizer)
    except OptimizerError:
        raise
    except Exception as error:
        raise OptimizerError(
            f"{plan_text} updates shards, which are one-dimensional ranges of elements, and {name} "
            f"does not take them: {error}. {CURE}"
        ) from error
    updated = torch.cat([param.detach().reshape(-1) for param in whole])
    pairs = zip(*halves, strict=True)
    joined = torch.cat([half.detach() for pair in pairs for half in pair])
    if not torch.allclose(updated, joined, rtol=1e-5, atol=1e-7):
        raise OptimizerError(
            f"{plan_text} updates shards, which are ranges of elements, and {name} is not "
            "elementwise: it updates a matrix otherwise than the two halves of its elements. "
            f"{CURE}"
        )


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has two sets of weights, which its train() and eval() exchange."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def begin_training(optimizer: torch.optim.Optimizer) -> None:
    """Put an optimizer with modes in training, before its first step."""
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


def _halves(matrix: Tensor) -> tuple[Tensor, Tensor]:
    flat = matrix.reshape(-1)
    return flat[:_CUT], flat[_CUT:]
