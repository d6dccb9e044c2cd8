"""A warning where a layer takes the samples of a batch as its time steps.

A plan divides dim 0 of a batch, the samples. Torch's recurrent layers and its attention take
[time, batch, width] unless they have `batch_first=True`. A batch with time first is divided along
time. Each part of a sequence is then trained as a sequence of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.batch import MicroBatch
from plait.engine.loss import LossSum
from plait.engine.stages.contexts import MicroBatchContext
from plait.plan import Plan

KINDS: Final = (nn.RNNBase, nn.MultiheadAttention)
LOOKS = 4
"""Forwards that are looked at."""


class TimeFirst(MicroBatchContext):
    """Compares the inputs [time, batch, width] of layers with the samples of a micro-batch."""

    def __init__(self, model: nn.Module, plan: Plan, world: World) -> None:
        self._parts = plan.dp.size * plan.micro_batches
        self._looks = LOOKS
        self._samples = 0
        self._shapes: dict[str, list[torch.Size]] = {}
        is_looked_at = self._parts > 1 and world.worker[0] == 0 and not plan.compile
        self._hooks = [
            module.register_forward_pre_hook(partial(self._note, name), with_kwargs=True)
            for name, module in model.named_modules()
            if is_looked_at and isinstance(module, KINDS) and not module.batch_first
        ]

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def enter(self, index: int, micro_batch: MicroBatch, *, recording: bool) -> None:
        self._samples = micro_batch.num_samples
        self._shapes.clear()

    def after_forward(self, losses: LossSum, loss: object) -> None:
        """Warn once of a layer whose every input has as many steps as there are samples."""
        self._looks -= 1
        found = [name for name, shapes in self._shapes.items() if all(map(self._is_cut, shapes))]
        if found:
            self._warn(found[0], self._shapes[found[0]][0])
        if found or self._looks <= 0:
            for hook in self._hooks:
                hook.remove()

    def _note(
        self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        given = args[0] if args else kwargs.get("input", kwargs.get("query"))
        if isinstance(given, Tensor) and given.dim() == 3:
            self._shapes.setdefault(name, []).append(given.shape)

    def _is_cut(self, shape: torch.Size) -> bool:
        return shape[0] == self._samples != shape[1]

    def _warn(self, name: str, shape: torch.Size) -> None:
        warnings.warn(
            f"'{name}' takes dim 0 of its input {list(shape)} as time, and a plan divides dim 0 of "
            f"a batch, the samples, into {self._parts} parts: each part of a sequence is then "
            "trained as a sequence of its own; give batches with the samples first, and transpose "
            "in the model, x.transpose(0, 1), or make the layer with batch_first=True",
            stacklevel=2,
        )
