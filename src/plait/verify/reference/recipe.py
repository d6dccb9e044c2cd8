"""How the reference is trained: the loss, the optimizer and its rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.values import PyTree

Loss = Callable[[PyTree, PyTree], PyTree]


@dataclass(frozen=True)
class Recipe:
    """How to train: `lr_factor(step)` multiplies the optimizer's rate; `clip_grad_norm` None means
    no clipping.
    """

    loss: Loss
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    clip_grad_norm: float | None = None
    lr_factor: Callable[[int], float] = lambda step: 1.0

    def made(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of parameters [...], in training where it has train() and eval()."""
        optimizer: Any = self.optimizer(params)
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        return optimizer
