"""Calls of a loss whose results mean the samples of a batch: which are chosen, or which is right.

The classes of a contrastive loss are the samples themselves. A mask chooses some samples.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.engine.loss_follower import TorchCall
from plait.torch_internals import has_function_transforms

OF_CLASSES: Final = frozenset({"cross_entropy", "nll_loss"})
WEIGHTED: Final = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
CHOICES: Final = frozenset({"where", "masked_fill", "setitem"})
"""Functions that put one number or another to each sample."""


def takes_a_statistic(call: TorchCall[Any], statistics: list[Tensor]) -> bool:
    """Whether samples get a statistic of all of them [...], by a mask or as a weight."""
    name = call.name
    if name in WEIGHTED:
        weights = (call.named.get("weight"), call.named.get("pos_weight"))
        return any(one is weight for one in statistics for weight in weights)
    return name in CHOICES and bool(statistics)


def classes_are_samples(call: TorchCall[Any], samples: list[Tensor]) -> bool:
    """Whether a function takes a square matrix [B, B], and of each row its own number as class.

    Targets of the batch, among `samples`, have classes of their own.
    """
    logits, classes = call.first, call.argument("target")
    if call.name not in OF_CLASSES or logits.dim() != 2 or logits.shape[0] != logits.shape[1]:
        return False
    if not isinstance(classes, Tensor) or any(classes is one for one in samples):
        return False
    if has_function_transforms():  # numbers are not read inside torch.func.vmap
        return False
    own = torch.arange(len(logits), device=classes.device)
    return len(logits) > 1 and torch.equal(classes, own)


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
