"""Losses as (sum, count): only the engine, which knows the count over all ranks and micro-batches,
may divide.

A mean of means is wrong as soon as two parts hold unequal numbers of unmasked targets. So no loss
here takes a mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.errors import ModelError
from plait.values import AutogradContext

Loss = Callable[..., Any]

IGNORE = -100
"""The target that counts for nothing, in the sum and in the count."""
LARGE_NUMEL = 1 << 19
"""Logits beyond which cross-entropy goes by groups of rows, on processors."""
GROUP_NUMEL = 1 << 18
"""Logits of such a group on processors, whose caches hold it."""
GPU_LARGE_NUMEL = 1 << 24
"""Logits beyond which it goes by groups on a GPU."""
GPU_GROUP_NUMEL = 1 << 26
"""Logits of such a group on a GPU, where smaller ones cost more to start than to compute."""


def large_numel(device: torch.device) -> int:
    """The most logits that go through a loss whole."""
    return LARGE_NUMEL if device.type == "cpu" else GPU_LARGE_NUMEL


def group_numel(device: torch.device) -> int:
    """The number of logits that go through a loss at once, where they do not go whole."""
    return GROUP_NUMEL if device.type == "cpu" else GPU_GROUP_NUMEL


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax(logits)[target], and the number of targets that are not `IGNORE`: both
    0-dim.

    `logits` [..., V], `targets` [...] integers; computed in float32 at least. Without any counted
    target: (0, 0).

    Raises:
        ModelError: other shapes, or targets that are no integers.
    """
    rows, flat, count = _rows(logits, targets)
    if rows.numel() > large_numel(rows.device):
        total: Tensor = _CrossEntropyByRows.apply(rows, flat, group_numel(rows.device))
        return total, count
    return F.cross_entropy(widen(rows), flat, ignore_index=IGNORE, reduction="sum"), count


def cross_entropy_compiled(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_entropy` of logits [..., V] and targets [...], by two compiled kernels.

    One reads the logits and gives two numbers a row, the other makes the gradient. Logits that are
    few, or on a processor, go as in `cross_entropy`.
    """
    rows, flat, count = _rows(logits, targets)
    if rows.device.type == "cpu" or rows.numel() <= large_numel(rows.device):
        return cross_entropy(logits, targets)
    total: Tensor = _CrossEntropyCompiled.apply(rows, flat)
    return total, count


def compiled(loss: Loss) -> Loss:
    """The form of a loss whose kernels are compiled, or the loss itself where there is none."""
    return cross_entropy_compiled if loss is cross_entropy else loss


def cross_entropy_by_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_entropy` of logits [..., V] and targets [...], as it goes where logits are large, in
    groups of a few rows.

    A proof takes it, so that small logits take the way of large ones.
    """
    rows, flat, count = _rows(logits, targets)
    total: Tensor = _CrossEntropyByRows.apply(rows, flat, 3 * rows.shape[-1])
    return total, count


def _rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, V], targets [N], and the number of targets that are not `IGNORE`."""
    if logits.shape[:-1] != targets.shape:
        raise ModelError(
            "cross entropy wants one target for each row of logits: the logits are "
            f"{list(logits.shape)}, "
            f"the targets {list(targets.shape)} and not {list(logits.shape[:-1])}"
        )
    if targets.is_floating_point():
        raise ModelError(f"cross entropy wants class numbers as targets, not {targets.dtype}")
    flat = targets.reshape(-1)
    return logits.reshape(-1, logits.shape[-1]), flat, (flat != IGNORE).sum()


class _CrossEntropyByRows(torch.autograd.Function):
    """Cross-entropy of logits [N, V] that makes one tensor of their size, which is their gradient.

    torch's own keeps a float32 copy and log-probabilities for backward, and makes two gradients of
    that size. This keeps two numbers a row, and computes probabilities again by groups of rows.
    Groups share their memory: glibc gives aligned memory out anew, and kept 16 MB for each of them.
    """

    @staticmethod
    def forward(ctx: AutogradContext, logits: Tensor, targets: Tensor, group_numel: int) -> Tensor:
        counted = targets != IGNORE
        columns = targets.masked_fill(~counted, 0)[:, None]
        step = max(1, group_numel // logits.shape[-1])
        largest = widen(logits.amax(-1, keepdim=True))
        groups = zip(logits.split(step), largest.split(step), strict=True)
        room = largest.new_empty(logits[:step].shape)
        sums = [
            torch.sub(widen(group), top, out=room[: len(group)]).exp_().sum(-1, keepdim=True)
            for group, top in groups
        ]
        # Apart from the largest, so that nothing is lost where logits are large.
        logs = torch.cat(sums).log_()
        losses = (logs + (largest - widen(logits.gather(-1, columns))))[:, 0]
        ctx.save_for_backward(logits, largest, logs, columns, counted)
        ctx.step = step
        return losses.masked_fill_(~counted, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, largest, logs, columns, counted = ctx.saved_tensors
        made = torch.empty_like(logits)
        factors = (gradients[0] * counted)[:, None]
        step = ctx.step
        parts = (one.split(step) for one in (logits, made, largest, logs, columns, factors))
        room = largest.new_empty(logits[:step].shape)
        for group, out, top, log, column, factor in zip(*parts, strict=True):
            probabilities = torch.sub(widen(group), top, out=room[: len(group)])
            probabilities.sub_(log).exp_()
            probabilities.scatter_add_(-1, column, torch.full_like(log, -1.0))
            out.copy_(probabilities.mul_(factor))
        return made, None, None


def _tops_and_logs(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row [N, V], and log(sum(exp(logit - largest))): both [N, 1]."""
    wide = widen(logits)
    largest = wide.amax(-1, keepdim=True)
    return largest, (wide - largest).exp().sum(-1, keepdim=True).log()


def _gradient_of_rows(
    logits: Tensor, largest: Tensor, logs: Tensor, columns: Tensor, factors: Tensor
) -> Tensor:
    """factors [N, 1] times (softmax(logits) - one-hot(columns)), in the type of logits [N, V]."""
    probabilities = (widen(logits) - largest - logs).exp()
    numbers = torch.arange(logits.shape[-1], device=logits.device)
    return ((probabilities - (numbers == columns).to(probabilities.dtype)) * factors).to(
        logits.dtype
    )


@functools.cache
def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function, made at its first call, since the compiler takes a second to load."""
    kernel: Callable[..., Any] = torch.compile(function)
    return kernel


class _CrossEntropyCompiled(torch.autograd.Function):
    """Cross-entropy of logits [N, V], which are read once in each direction."""

    @staticmethod
    def forward(ctx: AutogradContext, logits: Tensor, targets: Tensor) -> Tensor:
        counted = targets != IGNORE
        columns = targets.masked_fill(~counted, 0)[:, None]
        largest, logs = _kernel(_tops_and_logs)(logits)
        losses = (logs + (largest - widen(logits.gather(-1, columns))))[:, 0]
        ctx.save_for_backward(logits, largest, logs, columns, counted)
        return losses.masked_fill_(~counted, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, largest, logs, columns, counted = ctx.saved_tensors
        factors = (gradients[0] * counted)[:, None]
        made: Tensor = _kernel(_gradient_of_rows)(logits, largest, logs, columns, factors)
        return made, None


def count_targets(targets: Tensor) -> Tensor:
    """The count (0-dim) of `cross_entropy` for targets [...], which is known before there is any
    output.
    """
    return (targets != IGNORE).sum()


# mypy has no type for an attribute of a function.
for _loss in (cross_entropy, cross_entropy_by_rows, cross_entropy_compiled):
    setattr(_loss, "count", count_targets)  # noqa: B010


def mse(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over samples of the mean squared error over a sample's features, and the number of
    samples: both 0-dim.

    `output` and `target` [B, ...] of one shape; computed in float32 at least.

    Raises:
        ModelError: two shapes.
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
    """The number of targets that have the largest logit, and the number of targets: both 0-dim.

    `logits` [..., V], `targets` [...] integers. Targets that are `IGNORE` count for nothing.
    """
    counted = targets != IGNORE
    hits = (logits.argmax(dim=-1) == targets) & counted
    return hits.sum().double(), counted.sum()


def widen(tensor: Tensor) -> Tensor:
    """The tensor [...] in float32 at least."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
