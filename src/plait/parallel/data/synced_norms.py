"""`nn.SyncBatchNorm` under a plan: a batch norm whose statistics are of all data ranks' samples.

torch's own module exchanges them on GPUs alone, in its default group. Here two sums over the data
axis give the mean, and then the variance, of a micro-batch of all ranks (Ioffe and Szegedy, arXiv
1502.03167, algorithm 1). They are differentiable, so gradients are those of one device that takes
the samples together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm import Axis
from plait.comm.functional import transition
from plait.errors import NotAvailable
from plait.forwards import give_forward
from plait.mesh.layouts import PARTIAL, REPLICATED
from plait.plan import Plan
from plait.plan.facts import STRATEGIES


class SyncedNorms:
    """The synchronised batch norms of a model. Until `connect` each has this rank's statistics."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        """Take over the norms of a model. Raises `NotAvailable` where a plan cannot run them."""
        self._named = _named(model)
        self._axis: Axis | None = None
        self._counts = True
        for name, norm in self._named:
            _check(f"'{name}' (SyncBatchNorm)", norm, plan)
        for _, norm in self._named:
            give_forward(norm, _SyncedForward(norm, self))

    def __bool__(self) -> bool:
        return bool(self._named)

    def connect(self, axis: Axis) -> None:
        """Have the statistics be those of all ranks of an axis, from here on."""
        self._axis = axis

    def enter(self, num_samples: int) -> None:
        """A micro-batch is under way. The placeholder of one without samples does not count."""
        self._counts = num_samples > 0

    def sum(self, partial: Tensor) -> Tensor:
        """The sum [n] of every rank's `partial` [n]. Differentiable and collective."""
        partial = partial if self._counts else 0.0 * partial
        axis = self._axis
        if axis is None or axis.size == 1:
            return partial
        return transition(partial, axis, PARTIAL, REPLICATED)


def _check(label: str, norm: nn.Module, plan: Plan) -> None:
    cure = "take GroupNorm or LayerNorm, which compute alike under every plan, or plain BatchNorm"
    if not norm.training:
        return
    if plan.tp.size > 1 or plan.cp.size > 1:
        raise NotAvailable(
            f"{label} takes its statistics over data ranks, and '{plan}' also cuts the samples or "
            f"features of one rank; take tp and cp out of the plan, or {cure}"
        )
    if plan.dp.size > 1 and not STRATEGIES[plan.dp.strategy].synchronous:
        raise NotAvailable(
            f"{label} takes its statistics over ranks that step together, and those of {plan.dp} "
            f"do not; {cure}"
        )


def _named(model: nn.Module) -> list[tuple[str, nn.SyncBatchNorm]]:
    modules = model.named_modules()
    return [(name, one) for name, one in modules if isinstance(one, nn.SyncBatchNorm)]


class _SyncedForward:
    """The forward of one norm."""

    def __init__(self, norm: nn.SyncBatchNorm, ranks: SyncedNorms) -> None:
        self._norm = norm
        self._ranks = ranks

    def __call__(self, input: Tensor) -> Tensor:
        """[samples, channels, ...] -> the same, normalised by channel. Collective in training."""
        norm = self._norm
        norm._check_input_dim(input)
        if not norm.training:
            return _evaluated(norm, input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        channels = x.size(1)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [channels if dim == 1 else 1 for dim in range(x.dim())]
        count = x.new_full((1,), x.numel() / channels)
        sums = self._ranks.sum(torch.cat([x.sum(dims), count]))
        count = sums[-1].detach()
        mean = sums[:-1] / count.clamp(min=1)
        x = x - mean.view(shape)
        variance = self._ranks.sum(x.square().sum(dims)) / count.clamp(min=1)
        y = x * (variance + norm.eps).rsqrt().view(shape)
        if norm.weight is not None:
            y = y * norm.weight.view(shape) + norm.bias.view(shape)
        _remember(norm, mean.detach(), variance.detach(), count)
        return y.to(input.dtype)


def _evaluated(norm: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """The norm in evaluation: by its running statistics, or those of the samples here."""
    mean, variance = norm.running_mean, norm.running_var
    own = mean is None and variance is None
    return F.batch_norm(x, mean, variance, norm.weight, norm.bias, own, 0.0, norm.eps)


@torch.no_grad()
def _remember(norm: nn.SyncBatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Move the running statistics [channels] towards those of a micro-batch of `count` values."""
    if norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(count > 0)
    factor = (count > 0).to(count.dtype)
    if norm.momentum is None:
        factor = factor / norm.num_batches_tracked.clamp(min=1)
    else:
        factor = factor * norm.momentum
    unbiased = variance * count / (count - 1).clamp(min=1)
    for running, value in ((norm.running_mean, mean), (norm.running_var, unbiased)):
        running.add_(factor * (value.to(running.dtype) - running))
