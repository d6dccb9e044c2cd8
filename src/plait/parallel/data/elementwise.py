"""Is an optimizer elementwise? Found out by trying it, so that a user's own optimizer needs no
entry in a list.

A ZeRO shard is a range of elements that begins and ends inside parameters. A tensor axis gives
each rank a box. An optimizer that looks at a whole tensor (a norm, a factored second moment) would
silently compute something else. So it is refused before it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from plait import torch_internals
from plait.errors import OptimizerError
from plait.parallel.data.trial import (
    TINY,
    TRIES,
    begun,
    fill,
    gradients,
    group_of,
    is_elementwise_of_torch,
    raise_rates,
)
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

_LARGEST = 192


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
    make_optimizer: MakeOptimizer,
    plan_text: str,
    shapes: Sequence[Sequence[int]] = (TINY,),
    *,
    keep_dims: bool = False,
) -> None:
    """Raise `OptimizerError` unless the optimizer updates tensors and their parts alike.

    Each part has an optimizer of its own. `keep_dims`: parts are blocks of matrices.

    `make_optimizer` is tried on the CPU, on as many parameters as `shapes` has. In a first trial of
    three steps all have the shape (4, 6). In a second one, one of each group and shape keeps its
    shape, each dim cut to 192. Some optimizers treat large matrices otherwise than small ones and
    vectors. torch's own elementwise optimizers have the first trial alone.
    """
    trial = _PartsTrial(make_optimizer, plan_text, keep_dims=keep_dims)
    groups = trial.run([TINY] * len(shapes), range(len(shapes)), steady=False)
    if trial.is_of_torch:
        return
    clipped = [tuple(min(size, _LARGEST) for size in shape) for shape in shapes]
    first: dict[tuple[int, tuple[int, ...]], int] = {}
    for index, kind in enumerate(zip(groups, clipped, strict=True)):
        if trial.can_cut(kind[1]):
            first.setdefault(kind, index)
    moved = set(first.values())
    own = [one if at in moved else TINY for at, one in enumerate(clipped)]
    trial.run(own, moved, steady=True)


class _PartsTrial:
    """Steps of an optimizer of whole parameters, and of one for each of their parts.

    Attributes:
        is_of_torch: whether the optimizer of the last run is one of torch's elementwise ones.
    """

    def __init__(self, make_optimizer: MakeOptimizer, plan_text: str, *, keep_dims: bool) -> None:
        shards = "blocks of matrices" if keep_dims else "one-dimensional ranges of elements"
        self._make = make_optimizer
        self._what = f"{plan_text} updates shards, which are {shards}"
        self._cut = _blocks if keep_dims else _ranges
        self._name = "the optimizer"
        self.is_of_torch = False

    def can_cut(self, shape: Sequence[int]) -> bool:
        """Whether each part of a tensor of this shape has elements."""
        return len(shape) > 0 and all(part.numel() for part in self._cut(torch.empty(*shape)))

    def run(
        self, shapes: Sequence[Sequence[int]], moved: Collection[int], *, steady: bool
    ) -> list[int]:
        """The number of each parameter's group, of parameters of which those `moved` have
        gradients.

        Raises `OptimizerError` where whole parameters and their parts are updated otherwise.
        """
        for dtype, fills in TRIES:
            try:
                with torch_internals.without_compiling():
                    return self._run(shapes, moved, (dtype, fills), steady=steady)
            except OptimizerError:
                raise
            except Exception as error:
                failure = error
        raise OptimizerError(
            f"{self._what}, and {self._name} does not take them: {failure}. {CURE}"
        ) from failure

    def _run(
        self,
        shapes: Sequence[Sequence[int]],
        moved: Collection[int],
        way: tuple[torch.dtype, bool],
        *,
        steady: bool,
    ) -> list[int]:
        dtype, fills = way
        starts = begun(shapes, dtype)
        whole = [nn.Parameter(start.clone()) for start in starts]
        pieces = [[nn.Parameter(one.clone()) for one in self._cut(start)] for start in starts]
        params = (whole, *(list(part) for part in zip(*pieces, strict=True)))
        optimizers = [self._make(own) for own in params]
        self._name = type(optimizers[0]).__name__
        self.is_of_torch = all(map(is_elementwise_of_torch, optimizers))
        refuse_closures(optimizers[0])
        _refuse_groups_by_size(optimizers, params, self._what)
        for optimizer in optimizers:
            begin_training(optimizer)
            without_graphs(optimizer)
            if steady:
                raise_rates(optimizer)
        for own in params if fills else ():
            fill(own, moved)
        for grads in gradients(shapes, dtype, steady=steady):
            for index in moved:
                whole[index].grad = grads[index].clone()
                for piece, grad in zip(pieces[index], self._cut(grads[index]), strict=True):
                    piece.grad = grad.clone()
            for optimizer in optimizers:
                torch_internals.step(optimizer)
        if not all(self._are_alike(*one) for one in zip(starts, whole, pieces, strict=True)):
            raise OptimizerError(
                f"{self._what}, and {self._name} is not elementwise: it updates a matrix otherwise "
                f"than the parts of its elements. {CURE}"
            )
        return group_of(optimizers[0], whole)

    def _are_alike(self, start: Tensor, whole: Tensor, pieces: Sequence[Tensor]) -> bool:
        """Whether a parameter and its parts have moved alike, but for rounding."""
        begun_at = torch.cat([one.reshape(-1) for one in self._cut(start)])
        updated = torch.cat([one.reshape(-1) for one in self._cut(whole.detach())])
        joined = torch.cat([one.detach().reshape(-1) for one in pieces])
        if start.dtype == torch.float32:  # small updates are lost there
            return torch.allclose(updated, joined, rtol=1e-5, atol=1e-7, equal_nan=True)
        differ = (updated != joined) & ~(updated.isnan() & joined.isnan())
        largest = (updated - begun_at).nan_to_num(0.0, 0.0, 0.0).abs().max()
        return bool(((updated - joined)[differ].abs() <= 1e-5 * largest).all())


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


def _ranges(tensor: Tensor) -> tuple[Tensor, ...]:
    """Two ranges of elements, of which one begins within a row."""
    flat = tensor.reshape(-1)
    start = flat.numel() * 5 // 12
    return flat[:start], flat[start:]


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Four blocks, by the first two dims; by the first one where the second has one place."""
    if tensor.dim() < 2 or tensor.shape[1] == 1:
        return tensor.tensor_split(4)
    return tuple(block for rows in tensor.tensor_split(2) for block in rows.tensor_split(2, 1))
