"""Layer norm and RMS norm of features that are cut over an axis.

The statistics of a layer norm are merged from each rank's own mean and sum of squared deviations
(T. Chan et al., Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979).
E[x^2] - E[x]^2 would cancel where the mean is large. One collective of two numbers a token forward,
one backward; RMS norm needs one number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.comm import Axis
from plait.values import AutogradContext


def normalise(x: Tensor, axis: Axis, eps: float, *, centered: bool) -> Tensor:
    """The layer norm or RMS norm over all features, of which a rank has a part.

    Collective, forward and backward; differentiable once. Computed in float32 at least.

    Args:
        x: [..., features / size], this rank's features, equally many on each.
        axis: the `size` ranks that cut the features.
        eps: added to the variance or the mean square.
        centered: (x - mean) / sqrt(variance + eps); without it x / sqrt(mean square + eps).

    Returns:
        [..., features / size], of the type of `x`.
    """
    normal: Tensor = _Normalise.apply(x, axis, eps, centered)
    return normal


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, axis: Axis, eps: float, centered: bool) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if centered:
            mean, variance = _statistics(wide, axis)
            scale = (variance + eps).rsqrt()[..., None]
            normal = (wide - mean[..., None]) * scale
        else:
            scale = (_mean(wide.square().sum(-1), wide.shape[-1], axis) + eps).rsqrt()[..., None]
            normal = wide * scale
        ctx.save_for_backward(normal, scale)
        ctx.axis = axis
        ctx.centered = centered
        ctx.dtype = x.dtype
        return normal.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale = ctx.saved_tensors
        gradient = gradients[0].to(normal.dtype)
        sums = [(gradient * normal).sum(-1)]
        if ctx.centered:
            sums.append(gradient.sum(-1))
        means = _mean(torch.stack(sums), normal.shape[-1], ctx.axis)
        result = gradient - normal * means[0][..., None]
        if ctx.centered:
            result = result - means[1][..., None]
        return (result * scale).to(ctx.dtype), None, None, None


def _mean(sums: Tensor, local_size: int, axis: Axis) -> Tensor:
    """The mean over all features, from the sums over this rank's features."""
    sums = sums.contiguous()
    axis.all_reduce(sums).wait()
    return sums / (local_size * axis.size)


def _statistics(x: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Mean and variance over all features, merged from those of each rank."""
    size = x.shape[-1]
    mean = x.mean(-1)
    statistics = torch.stack([mean, (x - mean[..., None]).square().sum(-1)])
    gathered = statistics.new_empty((axis.size, *statistics.shape))
    axis.all_gather(gathered.view(-1), statistics.view(-1)).wait()
    # The deviations around each rank's mean, and of these means around the mean of all.
    means = gathered[:, 0]
    mean_of_all = means.mean(0)
    deviation = gathered[:, 1].sum(0) + size * (means - mean_of_all).square().sum(0)
    return mean_of_all, deviation / (size * axis.size)
