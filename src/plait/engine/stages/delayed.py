"""Asynchronous pipelines: steps of a stream that never drains, and updates from gradients of older
weights.

A step is a window of m micro-batches of the stream: all its forwards are done when it ends, some of
its backwards belong to the next. Each stage updates by itself, so there is no global norm. The
number of tokens that a gradient is divided by is known where the loss is; it travels backward with
the gradients. `flush` drains the pipeline, and the stream begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plait.comm import Axis
from plait.engine.batch import MicroBatch
from plait.engine.loss import LossSum, LossTotals, no_gradient
from plait.engine.stages.pipeline import Pipeline, index_of
from plait.engine.update import Update
from plait.parallel.pipeline.actions import Action, Kind
from plait.parallel.pipeline.payload import TensorForm
from plait.parallel.pipeline.runtime import Handler
from plait.parallel.pipeline.stream import Stream
from plait.parallel.pipeline.versions import WeightVersions

COUNT = TensorForm((), torch.float64, False)


class Delayed:
    """One stage of an asynchronous pipeline: its stream, its weight versions, its updates."""

    def __init__(
        self,
        pipeline: Pipeline,
        update: Update,
        stream: Stream,
        versions: WeightVersions,
        *,
        axes: tuple[Axis, Axis],
    ) -> None:
        self.versions = versions
        self._pipeline = pipeline
        self._update = update
        self._stream = stream
        self._ranks, self._stages = axes  # those of the stage, and those of the pipeline
        self._stage, self._part = next(iter(pipeline.parts.items()))
        self._counts: dict[int, Tensor] = {}  # of micro-batches whose backward is to come
        self._gathered = LossSum(self._part.strategy.group.device)  # of the update to come
        self._num_steps = 0
        self._micro_batches: dict[int, MicroBatch] = {}
        self._first_step = 0
        self._step = 0
        self._per_step = 1
        self._newest = 0
        pipeline.transport.gradient_extras = (COUNT,)

    def handlers(self, table: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
        """The table of a synchronous pipeline, with versions."""
        self._plain_forward = table[Kind.FORWARD]
        return {
            **table,
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.REDUCE: lambda action: self._part.strategy.before_last_backward(),
            Kind.UPDATE: self._apply,
        }

    def begin(
        self, micro_batches: Mapping[int, MicroBatch], step: int
    ) -> tuple[dict[int, MicroBatch], list[Action]]:
        """A window begins: the micro-batches under way by their numbers in the stream, and what to
        do.
        """
        first = self._num_steps * len(micro_batches)
        self._per_step = len(micro_batches)
        if self._num_steps == 0:
            self._first_step = step
            self._part.strategy.begin_step()
        self._step = step + 1
        fresh = {first + index: micro for index, micro in micro_batches.items()}
        oldest = first - self._stages.size - len(micro_batches)
        self._micro_batches = {
            j: micro for j, micro in self._micro_batches.items() if j >= oldest
        } | fresh
        actions = self._stream.step(self._num_steps)
        self._num_steps += 1
        return self._micro_batches, actions

    def drain(self) -> list[Action]:
        """What is left to do, and a new stream after it."""
        actions = self._stream.drain(self._num_steps)
        self._num_steps = 0
        return actions

    def end_drain(self) -> None:
        """The pipeline is empty."""
        self.versions.restart()

    def totals(self) -> LossTotals:
        """The loss of the window, known to the last stage and told to all. Collective."""
        loss = self._pipeline.loss
        sums = torch.stack([loss.loss_sum, loss.count, loss.tokens])
        sums /= self._update.loss_copies
        self._ranks.all_reduce(sums, control=True).wait()
        self._stages.broadcast(sums, self._stages.size - 1).wait()
        if loss.num_graphs == 0 and float(loss.count) > 0:
            raise no_gradient(self._step)
        loss_sum, count, tokens = sums.tolist()
        return LossTotals(loss_sum, count, 0.0, tokens / count if count else 1.0)

    def _forward(self, action: Action) -> None:
        self.versions.forward(index_of(action))
        before = self._pipeline.loss.count.clone()
        self._plain_forward(action)
        self._counts[index_of(action)] = self._pipeline.loss.count - before

    def _backward(self, action: Action) -> None:
        micro_batch = index_of(action)
        transport = self._pipeline.transport
        self.versions.backward(micro_batch)
        grads: list[Tensor] | None = None
        count = self._counts.pop(micro_batch)
        if self._stage < self._pipeline.num_stages - 1:
            grads = transport.take_gradients(self._stage, micro_batch)
            count = grads.pop()
        found = self._part.stage.backward(micro_batch, grads)
        transport.put_gradients(self._stage, micro_batch, [*found, count])
        self._gathered.count += count
        self._newest = micro_batch
        self._part.strategy.after_backward()
        self.versions.done(micro_batch)

    def _apply(self, action: Action) -> None:
        strategy = self._part.strategy
        strategy.reduce()
        self._update.sum_partial()
        totals = self._update.totals(self._gathered, self._ranks, None, _sum)
        self.versions.before_update()
        if totals.count > 0:
            step = self._first_step + self._newest // self._per_step
            self._update.make(self._update.change(totals, step, totals.count))
        strategy.publish()
        self.versions.after_update()
        self._gathered.reset()
        strategy.begin_step()


def _sum(totals: Tensor, axis: Axis) -> None:
    axis.all_reduce(totals, control=True).wait()


def memory_of(delayed: Delayed | None) -> list[Any]:
    """The weights of older versions."""
    return [] if delayed is None else delayed.versions.stashed
