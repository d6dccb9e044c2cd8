"""A vocabulary that is cut into ranges, one a rank: the embedding, and cross-entropy on logits.

M. Shoeybi et al., Megatron-LM (2019), section 3 (embedding and fused cross-entropy). No rank ever
holds whole logits: one collective gathers three numbers a token. They are the largest logit, the
sum of exponentials, and the target's logit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.comm import Axis
from plait.comm.functional import transition
from plait.errors import DataError
from plait.mesh.layouts import PARTIAL, REPLICATED, Sharded
from plait.parallel.tensor.mode import EmbeddingRule
from plait.values import AutogradContext

GROUP_NUMEL = 1 << 18
"""Logits that a processor takes at once: its caches hold their probabilities."""
GPU_GROUP_NUMEL = 1 << 26
"""Logits that a GPU takes at once: smaller groups cost more to start than to compute."""


def look_up(
    tokens: Tensor, table: Tensor, rule: EmbeddingRule, padding_index: int | None = None
) -> Tensor:
    """The vectors of token numbers, from a table that is cut.

    Collective; differentiable in `table`.

    Args:
        tokens: [batch, sequence], this rank's samples; the ranks of `rule.tokens` have others.
        table: [vocabulary / v, features / f], cut by `rule.vocabulary` and `rule.features`.
        rule: the axes that cut, and the layout of the result.
        padding_index: the token whose row gets no gradient.

    Returns:
        [batch, sequence / s, features / f], of s ranks of sequence parallel; s is 1 without.

    Raises:
        DataError: a token outside the vocabulary (seen on processors alone).
        PlanError: a dimension that does not divide by the ranks.
    """
    if rule.tokens is not None:
        tokens = transition(tokens, rule.tokens, Sharded(0), REPLICATED)
    if rule.rows is not None:
        table = transition(table, rule.rows, Sharded(0), REPLICATED)
    start = rule.total.rank * table.shape[0]
    size = table.shape[0]
    _check("token", tokens, size * rule.total.size)
    inside = tokens - start
    absent = (inside < 0) | (inside >= size)
    padding = None
    if padding_index is not None and 0 <= padding_index - start < size:
        padding = padding_index - start
    vectors = F.embedding(inside.masked_fill(absent, 0), table, padding)
    vectors = vectors.masked_fill(absent[..., None], 0.0)
    return transition(vectors, rule.total, PARTIAL, rule.target)


def cross_entropy(
    logits: Tensor, targets: Tensor, axis: Axis, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax(logits)[target], and the number of targets that count.

    Collective in forward; differentiable once in `logits`.

    Args:
        logits: [..., vocabulary / size], the ranges of the vocabulary in the order of the axis.
        targets: [...], token numbers, alike on the ranks of the axis.
        axis: the `size` ranks that cut the vocabulary.
        ignore_index: the target that does not count.

    Returns:
        Two scalars, alike on every rank.

    Raises:
        DataError: a target outside the vocabulary (seen on processors alone).
    """
    counted = targets.masked_fill(targets == ignore_index, 0)
    _check("target", counted, logits.shape[-1] * axis.size)
    total: Tensor = _CrossEntropy.apply(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), axis, ignore_index
    )
    return total, (targets != ignore_index).sum()


def _check(what: str, numbers: Tensor, vocab_size: int) -> None:
    """Refuse numbers outside the vocabulary, which no rank would hold: a row of zeros in silence.

    Processors only: on an accelerator the answer would hold up the stream.
    """
    if numbers.device.type != "cpu" or not numbers.numel() or torch.compiler.is_compiling():
        return
    low, high = (int(bound) for bound in numbers.aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise DataError(
            f"{what} {wrong} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1}); "
            "fit the tokenizer or [model] vocab_size"
        )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, logits: Tensor, targets: Tensor, axis: Axis, ignore_index: int
    ) -> Tensor:
        size = logits.shape[-1]
        counted = targets != ignore_index
        inside = targets - axis.rank * size
        local = counted & (inside >= 0) & (inside < size)  # targets in this rank's range
        column = inside.masked_fill(~local, 0)[:, None]
        largest = _wide(logits.amax(-1))
        at_once = GROUP_NUMEL if logits.device.type == "cpu" else GPU_GROUP_NUMEL
        step = max(1, axis.paths.limit("vocabulary_numel", at_once) // max(size, 1))
        axis.paths.note("vocabulary_numel", len(logits) > step)
        groups = zip(logits.split(step), largest.split(step), strict=True)
        sums = [(_wide(group) - top[:, None]).exp_().sum(-1) for group, top in groups]
        target_logits = _wide(logits.gather(-1, column)[:, 0]).masked_fill_(~local, 0.0)
        numbers = torch.stack([largest, torch.cat(sums), target_logits])
        gathered = numbers.new_empty((axis.size, *numbers.shape))
        axis.all_gather(gathered.view(-1), numbers.view(-1)).wait()
        # log of the sum of exp(x), each rank's sum taken from its own largest logit to that of all
        top = gathered[:, 0].amax(0)
        log = (gathered[:, 1] * (gathered[:, 0] - top).exp()).sum(0).log_()
        losses = log + (top - gathered[:, 2].sum(0))
        ctx.save_for_backward(logits, top, log, column, local, counted)
        ctx.step = step
        return losses.masked_fill_(~counted, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, top, log, column, local, counted = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        factor = gradients[0] * counted
        hit = -(gradients[0] * local)
        rows = (grad_logits, top, log, column, factor, hit)
        parts = (one.split(ctx.step) for one in rows)
        for group, out, most, sums, columns, scale, less in zip(
            logits.split(ctx.step), *parts, strict=True
        ):
            gradient = (_wide(group) - most[:, None]).sub_(sums[:, None]).exp_()
            gradient.mul_(scale[:, None])
            gradient.scatter_add_(-1, columns, less.to(gradient.dtype)[:, None])
            out.copy_(gradient)
        return grad_logits, None, None, None


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
