"""Losses that modules add to the mean loss (balance of experts), on one device: plain sums and a
backward of their own.

A module that has such a loss gives it by `auxiliary_loss()` after a forward: a mean over what that
forward saw. The mean over a step weighs the forwards by their samples.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Auxiliary:
    """Gathers values and gradients over the forwards of one step."""

    def __init__(self, model: nn.Module, num_samples: int) -> None:
        self.value = 0.0
        self.grads: dict[str, Tensor] = {}
        self._modules = [module for module in model.modules() if hasattr(module, "auxiliary_loss")]
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._num_samples = max(num_samples, 1)

    def add(self, num_samples: int) -> None:
        """Take in the forward that has just been; its graph is kept for the backward of the loss
        itself.
        """
        losses = [loss for module in self._modules if (loss := module.auxiliary_loss()) is not None]  # type: ignore[operator]
        if not losses:
            return
        share = num_samples / self._num_samples
        total = torch.stack([loss.reshape(()) for loss in losses]).sum() * share
        self.value += float(total.detach())
        grads = torch.autograd.grad(
            total, list(self._named.values()), retain_graph=True, allow_unused=True
        )
        for name, grad in zip(self._named, grads, strict=True):
            if grad is not None:
                self.grads[name] = self.grads[name] + grad if name in self.grads else grad
