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
from plait.values import JsonObject

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

CURE = (
    "Use an elementwise optimizer (SGD, Adam, AdamW, ...), plait.WholeTensors(function of the "
    "parameters), one that says needs_whole = True, or dpN:allreduce, ring or server without tpN"
)

CURE_OF_GROUPS = (
    "make groups by name (params.named()) or by the shape in the model "
    "(params.whole_shape(name, param)), or give the optimizer of the whole model, as "
    "optimizer=AdamW(groups)"
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


def require_elementwise(
    make_optimizer: MakeOptimizer, plan_text: str, count: int = 1, *, keep_dims: bool = False
) -> None:
    """Raise `OptimizerError` unless the optimizer updates matrices and their parts alike.

    Each part has an optimizer of its own. `keep_dims`: parts are blocks of matrices.

    `make_optimizer` is tried for three steps on the CPU, on `count` parameters (4, 6). Their parts
    are (10,) and (14,), or four blocks (2, 3).
    """
    generator = torch.Generator().manual_seed(0)
    cut = _blocks if keep_dims else _halves
    shards = "blocks of matrices" if keep_dims else "one-dimensional ranges of elements"
    starts = [torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in range(count)]
    whole = [nn.Parameter(start.clone()) for start in starts]
    pieces = [[nn.Parameter(one.clone()) for one in cut(start)] for start in starts]
    parts = [list(part) for part in zip(*pieces, strict=True)]
    name = "the optimizer"
    try:
        optimizers = [make_optimizer(params) for params in (whole, *parts)]
        name = type(optimizers[0]).__name__
        refuse_closures(optimizers[0])
        _refuse_groups_by_size(optimizers, (whole, *parts), f"{plan_text} updates {shards}")
        for optimizer in optimizers:
            begin_training(optimizer)
            without_graphs(optimizer)
        for _ in range(_STEPS):
            for param, own in zip(whole, pieces, strict=True):
                param.grad = torch.randn(_ROWS, _COLUMNS, generator=generator)
                for piece, grad in zip(own, cut(param.grad), strict=True):
                    piece.grad = grad.clone()
            for optimizer in optimizers:
                torch_internals.step(optimizer)
    except OptimizerError:
        raise
    except Exception as error:
        raise OptimizerError(
            f"{plan_text} updates shards, which are {shards}, and {name} does not take them: "
            f"{error}. {CURE}"
        ) from error
    updated = torch.cat([one.reshape(-1) for param in whole for one in cut(param.detach())])
    joined = torch.cat([piece.detach().reshape(-1) for own in pieces for piece in own])
    if not torch.allclose(updated, joined, rtol=1e-5, atol=1e-7):
        raise OptimizerError(
            f"{plan_text} updates shards, which are {shards}, and {name} is not elementwise: it "
            f"updates a matrix otherwise than the parts of its elements. {CURE}"
        )


def group_settings(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, JsonObject]:
    """The settings of each parameter's group that are plain values, as rate and decay, by name."""
    keys = {*getattr(optimizer, "defaults", ()), "lr", "lr_scale", "weight_decay"}
    settings: dict[int, JsonObject] = {}
    for group in optimizer.param_groups:
        found = {key: group[key] for key in keys & group.keys()}
        own = {key: one for key, one in found.items() if isinstance(one, int | float | str | tuple)}
        settings.update((id(param), own) for param in group["params"])
    return {name: settings[id(param)] for name, param in named if id(param) in settings}


def _refuse_groups_by_size(
    optimizers: Sequence[torch.optim.Optimizer],
    params: Sequence[Sequence[nn.Parameter]],
    what: str,
) -> None:
    named = [[(str(index), one) for index, one in enumerate(own)] for own in params]
    whole, *parts = (group_settings(*pair) for pair in zip(optimizers, named, strict=True))
    if any(part != whole for part in parts):
        raise OptimizerError(
            f"{what}, and the function of optimizer= puts these into other groups than whole "
            f"parameters, as by their dim() or numel(); {CURE_OF_GROUPS}"
        )


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has two sets of weights, which its train() and eval() exchange."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def begin_training(optimizer: torch.optim.Optimizer) -> None:
    """Put an optimizer with modes in training, before its first step."""
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


def without_graphs(optimizer: torch.optim.Optimizer) -> None:
    """Take away the mode that CUDA graphs ask for, and a CPU refuses."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = False


def _halves(matrix: Tensor) -> tuple[Tensor, Tensor]:
    flat = matrix.reshape(-1)
    return flat[:_CUT], flat[_CUT:]


def _blocks(matrix: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        block for rows in matrix.split(_ROWS // 2) for block in rows.split(_COLUMNS // 2, 1)
    )
