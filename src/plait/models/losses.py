"""Losses as (sum, count): only the engine, which knows the count over all ranks and micro-batches,
may divide.

A mean of means is wrong as soon as two parts hold unequal numbers of unmasked targets. So no loss
here takes a mean.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.errors import ModelError

IGNORE = -100
"""The target that counts for nothing, in the sum and in the count."""


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax(logits)[target], and the number of targets that are not `IGNORE`.

    `logits` [..., V], `targets` [...] integers; computed in float32 at least. Without any counted
    target: (0, 0).
    """
    if logits.shape[:-1] != targets.shape:
        raise ModelError(
            "cross entropy wants one target for each row of logits: the logits are "
            f"{list(logits.shape)}, "
            f"the targets {list(targets.shape)} and not {list(logits.shape[:-1])}"
        )
    if targets.is_floating_point():
        raise ModelError(f"cross entropy wants class numbers as targets, not {targets.dtype}")
    rows = widen(logits).reshape(-1, logits.shape[-1])
    total = F.cross_entropy(rows, targets.reshape(-1), ignore_index=IGNORE, reduction="sum")
    return total, (targets != IGNORE).sum()


def count_targets(targets: Tensor) -> Tensor:
    """The count of `cross_entropy`, which is known before there is any output."""
    return (targets != IGNORE).sum()


# mypy has no type for an attribute of a function.
setattr(cross_entropy, "count", count_targets)  # noqa: B010


def mse(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over samples of the mean squared error over a sample's features, and the number of
    samples.

    `output` and `target` [B, ...] of one shape; computed in float32 at least.
    """
    if output.shape != target.shape:
        raise ModelError(
            f"mse wants equal shapes: the output is {list(output.shape)}, the target "
            f"{list(target.shape)}"
        )
    num_features = max(output[0].numel() if len(output) else 1, 1)
    total = (widen(output) - widen(target)).square().sum() / num_features
    return total, torch.tensor(len(output), device=output.device)


def correct_classes(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The number of targets that have the largest logit, and the number of targets.

    `logits` [..., V], `targets` [...] integers. Targets that are `IGNORE` count for nothing.
    """
    counted = targets != IGNORE
    hits = (logits.argmax(dim=-1) == targets) & counted
    return hits.sum().double(), counted.sum()


def widen(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
