"""Modules that are not functions of their inputs alone, and the micro-batch that they need.

A router weighs auxiliary losses by the samples of a micro-batch. A tensor-parallel layer must know
the rows of all its ranks' batch. A synchronised batch norm must know whether a micro-batch has
samples at all. They learn it before each forward, and before each backward, which
may run parts of the forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from torch import Tensor, nn

from plait.engine.batch import MicroBatch
from plait.engine.loss import LossSum
from plait.parallel.data.synced_norms import SyncedNorms
from plait.parallel.tensor import TensorSplit


class MicroBatchContext:
    """Modules that must know which micro-batch is under way; one defines what it needs."""

    def begin_step(self, micro_batches: Sequence[MicroBatch], loss_divisor: float | Tensor) -> None:
        """A step begins, whose gradients are those of the sum of the losses over `loss_divisor`
        (0-dim). Collective.
        """

    def enter(self, index: int, micro_batch: MicroBatch, stage: int, *, recording: bool) -> None:
        """The forward or backward of a micro-batch begins in a stage.

        `recording` is true in a forward of training.
        """

    def after_forward(self, losses: LossSum, loss: object) -> None:
        """A forward has ended. `loss` is the loss function's result; None before the last stage."""


class TensorContext(MicroBatchContext):
    """The layers that a tensor axis has split.

    A stage may begin between a column and its row. `links` are the modules of each stage.
    """

    def __init__(
        self, split: TensorSplit, model: nn.Module, links: Sequence[Sequence[str]]
    ) -> None:
        self._split = split
        self._layouts = [
            split.layout_behind(model, chain.from_iterable(links[:stage]))
            for stage in range(len(links))
        ]

    def enter(self, index: int, micro_batch: MicroBatch, stage: int, *, recording: bool) -> None:
        self._split.enter(micro_batch.num_rows, self._layouts[stage])


class NormContext(MicroBatchContext):
    """Batch norms whose statistics are of all data ranks."""

    def __init__(self, norms: SyncedNorms) -> None:
        self._norms = norms

    def enter(self, index: int, micro_batch: MicroBatch, stage: int, *, recording: bool) -> None:
        self._norms.enter(micro_batch.num_samples)


def share_of(split: TensorSplit, micro_batch: MicroBatch) -> MicroBatch:
    """The part of a micro-batch that this rank of the tensor axis takes."""
    share = split.share(micro_batch.inputs, micro_batch.targets, micro_batch.num_samples)
    return replace(
        micro_batch,
        inputs=share.inputs,
        targets=share.targets,
        num_samples=share.num_samples,
        num_rows=share.num_rows,
    )
