"""The context of a rank's routers: sums and sequences over tokens on other ranks.

With it no number depends on how many ranks there are. The balance loss is that of all tokens of a
micro-batch, over all ranks. The loss is linear in the scores, so that the counts alone are summed.
Capacity is that of a whole sequence, so where sequences are cut, scores are gathered. An auxiliary
loss rides on the layer's output: its gradient starts when backward passes there. So it needs no
place in the loss function, and works on every pipeline stage and under recomputation.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from plait.comm import Axis
from plait.models.routing import RouterContext
from plait.values import AutogradContext


class SequenceCut(Protocol):
    """The cut of sequences over an axis: which positions lie on which rank."""

    axis: Axis

    def positions(self, rank: int | None = None) -> Tensor:
        """Positions [S here] (int64) of a rank's tokens in the whole sequence; of this rank without
        one.
        """
        ...

    def order(self) -> Tensor:
        """For each position [S], where it stands among the parts of all ranks laid end to end."""
        ...


class RankRouterContext(RouterContext):
    """The context of all routers of one rank. `tokens` is the axis over which ranks have other
    tokens.

    Its sums and gathers are collective: over `tokens`, or over the axis of `sequence`.
    """

    def __init__(self, tokens: Axis, sequence: SequenceCut | None = None) -> None:
        self._tokens = tokens
        self._sequence = sequence
        self._samples = torch.ones(1, dtype=torch.float64)
        self._weights = torch.ones(1, dtype=torch.float64)
        self._loss_divisor: float | Tensor = 1.0
        self._index = 0
        self.auxiliary_sum: Tensor | None = None

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of this step."""
        return len(self._samples)

    def begin_step(
        self, count: Tensor, samples: Tensor, loss_divisor: float | Tensor = 1.0
    ) -> None:
        """`count` (0-dim): what the loss of this step will be divided by; `samples` [micro-batches]
        of each; both summed over `tokens`, in float64.

        Gradients are those of the sum of the losses over `loss_divisor`.
        """
        self._loss_divisor = loss_divisor
        ranks_a_sample = 1 if self._sequence is None else self._sequence.axis.size
        self._samples = samples / ranks_a_sample
        self._weights = count * self._samples / self._samples.sum().clamp(min=1.0)

    def enter(self, micro_batch: int, *, present: bool, recording: bool) -> None:
        """A forward (or with `recording` False a backward, which may recompute it) of a micro-batch
        begins.
        """
        self._index = micro_batch
        self.present = float(present)
        self.recording = recording

    def take_auxiliary(self) -> Tensor | None:
        """This rank's part of the auxiliary losses since the last call, as a sum like the loss's
        own: 0-dim, float64. None where there were none.
        """
        total, self.auxiliary_sum = self.auxiliary_sum, None
        return total

    def sizes(self, num_samples: int, num_positions: int) -> tuple[Tensor, int]:
        ranks = 1 if self._sequence is None else self._sequence.axis.size
        return self._samples[self._index].clamp(min=1.0), num_positions * ranks

    def sum_tokens(self, counts: Tensor) -> Tensor:
        total = counts.detach().clone()
        self._tokens.all_reduce(total).wait()
        return total

    def sum_sequence(self, counts: Tensor) -> Tensor:
        total = counts.detach().clone()
        if self._sequence is not None:
            self._sequence.axis.all_reduce(total).wait()
        return total

    def whole_sequence(self, part: Tensor) -> Tensor:
        if self._sequence is None:
            return part
        axis = self._sequence.axis
        mine = part.detach().transpose(0, 1).contiguous()  # [S here, B, ...]
        whole = mine.new_empty((axis.size * mine.shape[0], *mine.shape[1:]))
        axis.all_gather(whole.view(-1), mine.view(-1)).wait()
        return whole[self._sequence.order().to(whole.device)].transpose(0, 1)

    def own_positions(self, whole: Tensor) -> Tensor:
        return (
            whole
            if self._sequence is None
            else whole[:, self._sequence.positions().to(whole.device)]
        )

    def attach(self, output: Tensor, auxiliary: Tensor | None) -> Tensor:
        if auxiliary is None:
            return output
        scale = self._weights[self._index]
        if self.recording:
            part = auxiliary.detach().double() * scale
            self.auxiliary_sum = part if self.auxiliary_sum is None else self.auxiliary_sum + part
        attached: Tensor = _Attach.apply(output, auxiliary, scale / self._loss_divisor)
        return attached


class _Attach(torch.autograd.Function):
    """The output as it is; in backward the auxiliary loss's gradient is `scale`, whatever the
    output's.
    """

    @staticmethod
    def forward(ctx: AutogradContext, output: Tensor, auxiliary: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale.to(auxiliary.dtype)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], ctx.scale, None
