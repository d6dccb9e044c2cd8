"""The task of a trial, and what its `make` gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from plait.batch_trees import joined
from plait.values import PyTree
from plait.verify.outside.loss import of_output
from plait.verify.outside.source import FunctionSource
from plait.verify.reference.batches import Batch
from plait.verify.reference.recipe import Loss

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Trial:
    """The task of the ranks. `tolerance` None: that of the precision."""

    source: FunctionSource
    steps: int = 3
    dtype: str = "float64"
    tolerance: float | None = None


@dataclass(frozen=True)
class Made:
    """Result of `make()`, in the precision of the trial; `batches` as (inputs, targets)."""

    model: nn.Module
    given: Sequence[PyTree]
    loss: Loss | None
    notes: tuple[str, ...] = ()

    @property
    def batches(self) -> list[Batch]:
        """Each batch as inputs and targets; a mapping is both."""
        return [(one, one) if isinstance(one, Mapping) else tuple(one) for one in self.given]

    @property
    def together(self) -> Batch:
        """All batches as one."""
        whole: Batch = joined(self.batches)
        return whole

    @property
    def reference_loss(self) -> Loss:
        """The loss of one device; a model may compute its own."""
        return of_output if self.loss is None else self.loss
