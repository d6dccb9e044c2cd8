"""The optimizers and learning-rate schedules that a config can name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait import reference, torch_internals
from plait.config import Train
from plait.errors import OptimizerError, PlaitError
from plait.models.parameters import OnWhole, Parameters
from plait.values import JsonObject

MATRIX = 2
MOMENTUM = 0.95
RMS_OF_ADAMW = 0.2
IN_A_BLOCK = re.compile(r"(^|\.)\d+\.")
"""A name with a number in it, which a list of blocks gives."""


def from_config(train: Train) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """The function that makes `[train] optimizer`, with no decay for the names of `no_decay`.

    The fused kernels read and write each element once a step. Errors: `OptimizerError` of a user's
    own function.
    """
    if ":" in train.optimizer:
        function = reference.load(train.optimizer, OptimizerError, "train.optimizer")
        return _marked_like(function, partial(_made_by_user, function, train.optimizer))
    if train.optimizer == "muon":
        return _marked_like(Muon, partial(Muon, train=train))
    return lambda params: _elementwise(groups_of(named(params), train), train)


def _marked_like(
    function: object, made: Any
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """A function of parameters that says what the optimizer needs whole, as another one does."""
    for mark in ("needs_whole", "keeps_state_whole"):
        setattr(made, mark, getattr(function, mark, False))
    return cast("Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]", made)


def named(params: Iterable[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """The parameters with their names in the model; empty names where they are unknown."""
    if isinstance(params, Parameters):
        return params.named()
    return [("", param) for param in params]


def groups_of(params: Sequence[tuple[str, nn.Parameter]], train: Train) -> list[JsonObject]:
    """Parameter groups: those with equal learning rate and weight decay stand together."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, param in params:
        groups.setdefault(settings_of(name, train), []).append(param)
    groups = groups or {(train.lr, train.weight_decay): []}
    return [
        {"params": own, "lr": lr, "weight_decay": weight_decay}
        for (lr, weight_decay), own in groups.items()
    ]


def settings_of(name: str, train: Train) -> tuple[float, float]:
    """The learning rate and the weight decay of a parameter: its group's, else those of `[train]`.

    A weight decay that a group names goes before `no_decay`.
    """
    is_spared = any(word in name for word in train.no_decay)
    weight_decay = 0.0 if is_spared else train.weight_decay
    group = next((one for one in train.groups if fnmatchcase(name, one.match)), None)
    if group is None:
        return train.lr, weight_decay
    lr = train.lr if group.lr is None else group.lr
    return lr, weight_decay if group.weight_decay is None else group.weight_decay


def _elementwise(groups: list[JsonObject], train: Train) -> torch.optim.Optimizer:
    if train.optimizer == "sgd":
        sgd = torch.optim.SGD(
            groups,
            lr=train.lr,
            momentum=train.momentum,
            nesterov=train.nesterov,
            fused=True,
        )
        sgd.register_step_pre_hook(_momentum_of_all)
        return sgd
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)


def _momentum_of_all(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Give a parameter that gets its first gradient later than others a momentum of zero.

    Torch's fused kernel takes the momentum of all its parameters, or of none.
    """
    for group in optimizer.param_groups:
        moved = [param for param in group["params"] if param.grad is not None]
        begun = [param for param in moved if "momentum_buffer" in optimizer.state[param]]
        if group["momentum"] and 0 < len(begun) < len(moved):
            for param in moved:
                state = optimizer.state[param]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(param)


def _made_by_user(
    function: Callable[[Iterable[nn.Parameter]], object], name: str, params: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    try:
        optimizer = function(params)
    except PlaitError:
        raise
    except Exception as error:
        raise OptimizerError(
            f"train.optimizer = '{name}' failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"train.optimizer = '{name}' returned a {type(optimizer).__name__}; it must return a "
            "torch.optim.Optimizer of the parameters that it is given"
        )
    return optimizer


class OrthogonalMomentum(torch.optim.Optimizer):
    """Muon's update of matrices, of which ranks may hold parts.

    Momentum is elementwise, so each rank keeps that of its parts. Newton-Schulz is of the whole
    matrix and computes in bf16, so that nothing is lost when bf16 travels.
    """

    def __init__(
        self,
        groups: list[JsonObject],
        train: Train,
        matrices: Sequence[tuple[str, nn.Parameter]],
        shapes: Mapping[str, tuple[int, ...]],
        whole: OnWhole | None,
    ) -> None:
        super().__init__(groups, {"lr": train.lr, "momentum": MOMENTUM})
        self._matrices = matrices
        self._shapes = shapes
        self._whole = whole

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure here
        """Update every matrix. Collective where ranks hold parts; a closure is not called."""
        group_of = {id(param): group for group in self.param_groups for param in group["params"]}
        used = {name: param for name, param in self._matrices if param.grad is not None}
        updates = {
            name: self._momentum(param, group_of[id(param)]["momentum"])
            for name, param in used.items()
        }
        orthogonal = torch_internals.orthogonal
        if self._whole is None:
            orthogonal_updates = {name: orthogonal(update) for name, update in updates.items()}
        else:
            orthogonal_updates = self._whole.apply(updates, orthogonal)
        for name, param in used.items():
            group = group_of[id(param)]
            rate = group["lr"] * RMS_OF_ADAMW * math.sqrt(max(self._shapes[name]))
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(orthogonal_updates[name], alpha=-rate)

    def _momentum(self, param: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's momentum of a gradient, as the bf16 that Newton-Schulz begins with."""
        grad = param.grad
        assert grad is not None
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        kept = state["momentum_buffer"]
        kept.lerp_(grad, 1 - momentum)
        return grad.lerp(kept, momentum).bfloat16()


class Muon(torch.optim.Optimizer):
    """Muon on the matrices of blocks, AdamW on all other parameters, with one learning rate.

    Muon's update is torch's, with `adjust_lr_fn="match_rms_adamw"` (Jordan 2024; Liu et al. 2025,
    "Muon is Scalable for LLM Training").
    """

    needs_whole = True

    def __init__(self, params: Iterable[nn.Parameter], train: Train) -> None:
        pairs = named(params)
        owned = params if isinstance(params, Parameters) else Parameters(pairs)
        shapes = {name: owned.whole_shape(name, one) for name, one in pairs}
        matrices = [
            (name, one)
            for name, one in pairs
            if len(shapes[name]) == MATRIX and IN_A_BLOCK.search(name)
        ]
        chosen = {id(param) for _, param in matrices}
        others = [(name, one) for name, one in pairs if id(one) not in chosen]
        self._parts: list[torch.optim.Optimizer] = []
        if owned.whole is not None:
            owned.whole.restrict(lambda name: IN_A_BLOCK.search(name) is not None)
        if matrices or owned.whole is not None:
            groups = groups_of(matrices, train)
            self._parts.append(OrthogonalMomentum(groups, train, matrices, shapes, owned.whole))
        if others:
            groups = groups_of(others, train)
            fused = torch.optim.AdamW(
                groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True
            )
            self._parts.append(fused)
        super().__init__([{"params": [param]} for _, param in pairs] or [{"params": []}], {})
        # The parts update their own groups; the state of all is one, as a checkpoint reads it.
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for own in self._parts:
            own.state = self.state

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure here
        """Update every parameter. A closure is not called."""
        for part in self._parts:
            torch_internals.step(part)


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


def rate_of_step(train: Train) -> Callable[[int], float]:
    """The learning rate by step, from 0."""
    factor = learning_rate(train)
    return lambda step: train.lr * (1.0 if factor is None else factor(step))
