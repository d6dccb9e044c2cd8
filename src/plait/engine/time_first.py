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

from plait.batch_trees import tensors_of
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
        self._first_dims: set[torch.Size] = set()
        self._shapes: dict[str, list[torch.Size]] = {}
        is_looked_at = self._parts > 1 and world.worker[0] == 0 and not plan.compile
        self._hooks = [
            module.register_forward_pre_hook(partial(self._note, name), with_kwargs=True)
            for name, module in model.named_modules()
            if is_looked_at and isinstance(module, KINDS) and not module.batch_first
        ]

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def enter(self, index: int, micro_batch: MicroBatch, stage: int, *, recording: bool) -> None:
        is_looked_at = recording and self._looks > 0
        self._samples = micro_batch.num_samples if is_looked_at else 0
        if is_looked_at:
            inputs = tensors_of(micro_batch.inputs)
            self._first_dims = {leaf.shape[:2] for leaf in inputs if not leaf.is_nested}

    def after_forward(self, losses: LossSum, loss: object) -> None:
        """Warn once of a layer whose every input has as many steps as there are samples."""
        if not self._samples:
            return
        samples, self._samples = self._samples, 0
        self._looks -= 1
        found = [name for name, shapes in self._shapes.items() if self._are_cut(shapes, samples)]
        if found:
            self._warn(found[0], self._shapes[found[0]][0])
        self._shapes.clear()
        if found or self._looks <= 0:
            for hook in self._hooks:
                hook.remove()

    def _note(
        self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if not self._samples or torch.compiler.is_compiling():
            return
        given = args[0] if args else kwargs.get("input", kwargs.get("query"))
        if isinstance(given, Tensor) and given.dim() == 3:
            self._shapes.setdefault(name, []).append(given.shape)

    def _are_cut(self, shapes: Sequence[torch.Size], samples: int) -> bool:
        """Whether inputs [time, batch, width] have samples as their time.

        A model may fold another dim into `batch`, which is then a multiple of the samples. A batch
        with time first may have such a size too, and then an input of the model begins alike.
        """
        for shape in shapes:
            is_multiple = shape[1] % samples == 0
            is_folded = is_multiple and (samples == 1 or shape[:2] not in self._first_dims)
            if shape[0] != samples or shape[1] == samples or is_folded:
                return False
        return True

    def _warn(self, name: str, shape: torch.Size) -> None:
        warnings.warn(
            f"'{name}' takes dim 0 of its input {list(shape)} as time, and a plan divides dim 0 of "
            f"a batch, the samples, into {self._parts} parts: each part of a sequence is then "
            "trained as a sequence of its own; give batches with the samples first, and transpose "
            "in the model, x.transpose(0, 1), or make the layer with batch_first=True",
            stacklevel=2,
        )
