"""The loss, the optimizer and the learning rate of a `[train]` section, from torch alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait import models
from plait.config import Train
from plait.models import losses
from plait.models.parameters import Parameters
from plait.values import JsonMapping, PyTree
from plait.verify.reference.recipe import Loss

MASKED = -100
MUON_MOMENTUM = 0.95


def plain_loss(keys: JsonMapping) -> Loss:
    """The loss of a `[model]` section that names none of the user's own."""
    return _squared_error if keys.get("name") in models.OF_FIELDS else _cross_entropy


def _cross_entropy(logits: PyTree, targets: PyTree) -> tuple[Tensor, Tensor]:
    """Sum over the targets that are not masked, and how many they are."""
    if logits.shape[:-1] != targets.shape or targets.is_floating_point():
        return losses.cross_entropy(logits, targets)  # which says what is wrong
    rows = logits.flatten(0, -2)
    wide = rows.float() if rows.itemsize < 4 else rows
    total = F.cross_entropy(wide, targets.flatten(), ignore_index=MASKED, reduction="sum")
    return total, (targets != MASKED).sum()


def _squared_error(output: PyTree, target: PyTree) -> tuple[Tensor, Tensor]:
    """Sum over samples of the mean squared error of one, and how many samples there are."""
    if output.shape != target.shape:
        return losses.mse(output, target)  # which says what is wrong
    wide = output.float() if output.itemsize < 4 else output
    errors = F.mse_loss(wide, target.to(wide.dtype), reduction="none")
    return errors.flatten(1).mean(1).sum(), torch.tensor(len(output))


def plain_rate(train: Train, step: int) -> float:
    """The factor on the rate at a step, from 0."""
    if train.warmup_steps and step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return 1.0
    steps = max(train.steps - train.warmup_steps, 1)
    done = min((step - train.warmup_steps) / steps, 1.0)
    least = train.min_lr / train.lr if train.lr else 0.0
    left = 1.0 - done if train.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return least + (1.0 - least) * left


def plain_optimizer(train: Train, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's optimizer of the name, element by element; the engine may use a fused kernel."""
    named = params.named() if isinstance(params, Parameters) else [("", one) for one in params]
    if train.optimizer == "sgd":
        return torch.optim.SGD(
            _groups(named, train), momentum=train.momentum, nesterov=train.nesterov, foreach=False
        )
    if train.optimizer != "muon":
        return _adamw(named, train)
    blocks = [pair for pair in named if pair[1].dim() == 2 and re.search(r"(^|\.)\d+\.", pair[0])]
    inside = {name for name, _ in blocks}
    others = [pair for pair in named if pair[0] not in inside]
    parts = [_adamw(others, train)] if others else []
    return _Several([_muon(blocks, train), *parts] if blocks else parts)


def _adamw(named: list[tuple[str, nn.Parameter]], train: Train) -> torch.optim.Optimizer:
    groups = _groups(named, train)
    return torch.optim.AdamW(groups, betas=train.betas, eps=train.eps, foreach=False)


def _muon(named: list[tuple[str, nn.Parameter]], train: Train) -> torch.optim.Optimizer:
    groups = _groups(named, train)
    return torch.optim.Muon(groups, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")


def _groups(named: list[tuple[str, nn.Parameter]], train: Train) -> list[dict[str, Any]]:
    """A group for each parameter, with its rate and its decay."""
    groups: list[dict[str, Any]] = []
    for name, param in named:
        lr, decay = train.lr, train.weight_decay
        if any(word in name for word in train.no_decay):
            decay = 0.0
        table = next((one for one in train.groups if fnmatchcase(name, one.match)), None)
        if table is not None and table.lr is not None:
            lr = table.lr
        if table is not None and table.weight_decay is not None:
            decay = table.weight_decay
        groups.append({"params": [param], "lr": lr, "weight_decay": decay})
    return groups or [{"params": [], "lr": train.lr, "weight_decay": train.weight_decay}]


class _Several(torch.optim.Optimizer):
    """Several optimizers that step together, with the groups of all."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure here
        """Update every parameter. A closure is not called."""
        for part in self._parts:
            part.step()
