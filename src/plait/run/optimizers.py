"""The optimizers and learning-rate schedules that a config can name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from plait.config import Train


def from_config(train: Train) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """The function that makes `[train] optimizer`. The fused kernels read and write each element
    once a step.
    """

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if train.optimizer == "sgd":
            return torch.optim.SGD(
                params,
                lr=train.lr,
                momentum=train.momentum,
                nesterov=train.nesterov,
                weight_decay=train.weight_decay,
                fused=True,
            )
        return torch.optim.AdamW(
            params,
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=True,
        )

    return make


def learning_rate(train: Train) -> Callable[[int], float] | None:
    """The factor on `lr` by step, from 0: linear warm-up, then constant, linear or cosine down to
    `min_lr`.
    """
    if train.schedule == "constant" and not train.warmup_steps:
        return None
    floor = train.min_lr / train.lr if train.lr else 0.0

    def factor(step: int) -> float:
        if step < train.warmup_steps:
            return (step + 1) / train.warmup_steps
        if train.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
        shape = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }
        return floor + (1.0 - floor) * shape[train.schedule]

    return factor
