"""A vocabulary that is cut into ranges, one a rank: the embedding, and cross-entropy on logits.

M. Shoeybi et al., Megatron-LM, section 3 (embedding and fused cross-entropy). No rank ever holds
whole logits: one collective gathers three numbers a token. They are the largest logit, the sum of
exponentials, and the target's logit.
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


def look_up(
    tokens: Tensor, table: Tensor, rule: EmbeddingRule, padding_index: int | None = None
) -> Tensor:
    """Token numbers [B, S] -> [B, S, D], both as the residual stream has them; `table` is this
    rank's part.
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

    `logits` [..., V / axis.size], the ranges of the vocabulary in the order of the axis; `targets`
    [...] alike on its ranks.
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
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        size = wide.shape[-1]
        counted = targets != ignore_index
        inside = targets - axis.rank * size
        local = counted & (inside >= 0) & (inside < size)  # targets in this rank's range
        column = inside.masked_fill(~local, 0)[:, None]
        largest = wide.amax(-1)
        exponentials = (wide - largest[:, None]).exp_()
        target_logits = wide.gather(-1, column)[:, 0].masked_fill(~local, 0.0)
        numbers = torch.stack([largest, exponentials.sum(-1), target_logits])
        gathered = numbers.new_empty((axis.size, *numbers.shape))
        axis.all_gather(gathered.view(-1), numbers.view(-1)).wait()
        # log of the sum of exp(x), each rank's sum taken from its own largest logit to that of all
        top = gathered[:, 0].amax(0)
        total = (gathered[:, 1] * (gathered[:, 0] - top).exp()).sum(0)
        losses = total.log() + top - gathered[:, 2].sum(0)
        probabilities = exponentials.mul_(((largest - top).exp() / total)[:, None])
        ctx.save_for_backward(probabilities, column, local, counted)
        ctx.dtype = logits.dtype
        return losses.masked_fill_(~counted, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, column, local, counted = ctx.saved_tensors
        gradient = probabilities * (gradients[0] * counted)[:, None]
        gradient.scatter_add_(-1, column, -(gradients[0] * local).to(gradient.dtype)[:, None])
        return gradient.to(ctx.dtype), None, None, None
