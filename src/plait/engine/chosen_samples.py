"""Calls of a loss whose results mean the samples of a batch: which are chosen, or which is right.

The classes of a contrastive loss are the samples themselves. A mask chooses some samples.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.engine.loss_follower import TorchCall
from plait.engine.notes import Notes
from plait.torch_internals import has_function_transforms

OF_CLASSES: Final = frozenset({"cross_entropy", "nll_loss"})
WEIGHTED: Final = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
FACTORIES: Final = frozenset({"arange", "range", "linspace", "logspace"})
PRODUCTS: Final = frozenset({"mul", "rmul", "multiply", "div", "truediv", "divide"})
CHOICES: Final = frozenset({"where", "masked_fill", "setitem"})
"""Functions that put one number or another to each sample."""


def takes_a_statistic(call: TorchCall[Any], statistics: list[Tensor]) -> bool:
    """Whether samples get a statistic of all of them [...], by a mask or as a weight."""
    name = call.name
    if name in WEIGHTED:
        weights = (call.named.get("weight"), call.named.get("pos_weight"))
        return any(one is weight for one in statistics for weight in weights)
    return name in CHOICES and bool(statistics)


class OwnPlaces:
    """Numbers that a loss makes by `torch.arange` and such, as the places of samples in a batch."""

    def __init__(self) -> None:
        self._made = Notes[bool]()

    def tell(self, call: TorchCall[Any], samples: list[Tensor], turned: list[Tensor]) -> bool:
        """Whether samples [B, ...] are told by their places: as classes, or by a weight of each.

        Another dim may be that of samples in `turned`; classes alone are looked at there. The
        results of a call that makes such numbers are noted.
        """
        if has_function_transforms():  # numbers are not read inside torch.func.vmap
            return False
        given = call.tensors()
        of_places = [one for one in given if one in self._made]
        if _counts_places(call) or (given and len(of_places) == len(given) and _derives(call)):
            for made in call.made:
                self._made.add(made, True)
        if call.name in OF_CLASSES and any(given[0] is one for one in (*samples, *turned)):
            classes = call.argument("target")
            return any(classes is one and _are_classes(given[0], one) for one in of_places)
        pairs = ((place, one) for place in of_places for one in samples)
        return call.name in PRODUCTS and any(_weighs(*pair) for pair in pairs)


def _counts_places(call: TorchCall[Any]) -> bool:
    """Whether a function makes numbers that go up from place to place."""
    is_list = call.name in ("tensor", "as_tensor") and isinstance(call.argument("data", 0), range)
    return is_list or call.name in FACTORIES


def _derives(call: TorchCall[Any]) -> bool:
    """Whether a function makes numbers of those that it gets, and draws none."""
    return not any(word in call.name for word in ("rand", "like", "new", "normal", "bernoulli"))


def _are_classes(logits: Tensor, classes: Tensor) -> bool:
    """Whether each row of a square matrix [B, B] has its own number as class."""
    if logits.dim() != 2 or logits.shape[0] != logits.shape[1] or len(logits) < 2:
        return False
    return torch.equal(classes, torch.arange(len(logits), device=classes.device))


def _weighs(places: Tensor, samples: Tensor) -> bool:
    """Whether numbers [B] or [B, 1, ...] are another weight for each place of samples [B, ...].

    Weights that repeat themselves, as the signs of pairs, are those of places in a block.
    """
    rows = len(places) if places.dim() else 0
    if places.dim() != samples.dim() or rows != len(samples) or places.numel() != rows or rows < 3:
        return False
    steps = (step for step in range(1, rows // 2 + 1) if rows % step == 0)
    return not any(torch.equal(places[:-step], places[step:]) for step in steps)


def takes_several(call: TorchCall[Any], made: Tensor) -> bool:
    """Whether a function takes several of some samples [B, ...] by their places."""
    if len(made) < 2 or call.args[0] is not call.first:
        return False
    dim = call.argument("dim", 1 if call.name in ("narrow", "index_select") else 2)
    if call.name in ("chunk", "split", "tensor_split", "narrow", "index_select"):
        return dim in (None, 0)
    index = call.args[1] if call.name == "getitem" else None
    first = index[0] if isinstance(index, tuple) and index else index
    return isinstance(first, slice) and first != slice(None)


def selects_by_a_mask(call: TorchCall[Any], samples: list[Tensor]) -> bool:
    """Whether a function takes those of some samples [B, ...] for which a mask [B] is true."""
    if call.name != "getitem" or not any(call.args[0] is one for one in samples):
        return False
    index = call.args[1]
    mask = index[0] if isinstance(index, tuple) and index else index
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and bool(mask.dim())


def einsum_mixes(call: TorchCall[Any]) -> bool:
    """Whether the samples of several factors meet, or are summed into a matrix."""
    equation = call.args[0]
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return False
    factors, _, made = equation.replace(" ", "").partition("->")
    pairs = zip(factors.split(","), tree_leaves(call.args[1:]), strict=False)
    firsts = {factor[:1] for factor, given in pairs if any(given is one for one, _ in call.kinds)}
    return bool(made) and (len(firsts) > 1 or not firsts <= set(made))


def takes_one(call: TorchCall[Any]) -> bool:
    """Whether a function gives samples one by one, or one of them."""
    dim = call.args[1] if len(call.args) > 1 else 0
    if call.name in ("unbind", "select"):
        return dim == 0
    first = dim[0] if isinstance(dim, tuple) and dim else dim
    return call.name == "getitem" and isinstance(first, int) and not isinstance(first, bool)


def stacks_first(call: TorchCall[Any]) -> bool:
    """Whether a function puts a dim of its tensors, as of several heads, before the samples."""
    return call.name == "stack" and call.argument("dim") in (None, 0)
