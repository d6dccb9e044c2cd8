"""Asynchronous pipelines: steps of a stream that never drains, and updates from gradients of older
weights.

A step is a window of m micro-batches of the stream. All its forwards are done when it ends; some of
its backwards belong to the next. Each stage updates by itself, so there is no global norm. The
number of tokens that divides a gradient is known where the loss is. It travels backward with the
gradients. `flush` drains the pipeline, and the stream begins again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.comm import Axis
from plait.engine.batch import MicroBatch
from plait.engine.loss import LossSum, LossTotals, no_gradient
from plait.engine.stages.pipeline import Pipeline, PipelineStep, index_of
from plait.engine.stages.timing import UpdateTiming
from plait.engine.update import Update
from plait.parallel.pipeline.actions import Action, Kind
from plait.parallel.pipeline.payload import TensorForm
from plait.parallel.pipeline.runtime import Handler
from plait.parallel.pipeline.stream import Stream
from plait.parallel.pipeline.versions import WeightVersions

COUNT = TensorForm((), torch.float64, False)


class DelayedUpdates(UpdateTiming):
    """One stage of an asynchronous pipeline: its stream, its weight versions, its updates."""

    def __init__(
        self,
        pipeline: Pipeline,
        update: Update,
        stream: Stream,
        versions: WeightVersions,
        *,
        reductions: Sequence[Callable[[], None]],
        ranks_of_stage: Axis,
        stages: Axis,
    ) -> None:
        """Take the only stage of `pipeline`; `reductions` sum its gradients over ranks."""
        self.versions = versions
        self._pipeline = pipeline
        self._update = update
        self._stream = stream
        self._reductions = tuple(reductions)
        self._ranks = ranks_of_stage
        self._stages = stages
        self._stage, self._part = next(iter(pipeline.parts.items()))
        self._counts: dict[int, Tensor] = {}  # of micro-batches whose backward is to come
        self._gathered = LossSum(self._part.strategy.group.device)  # of the update to come
        self._num_steps = 0
        self._micro_batches: dict[int, MicroBatch] = {}
        self._first_step = 0
        self._step = 0
        self._per_step = 1
        self._newest = 0
        self._settings: dict[int, list[dict[str, Any]]] = {}  # of the optimizer, by step

    def handlers(self, table: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
        return {
            **table,
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.REDUCE: lambda action: self._part.strategy.before_last_backward(),
            Kind.UPDATE: self._apply,
        }

    def begin(self, step: PipelineStep, index: int) -> tuple[PipelineStep, Sequence[Action]]:
        """A window begins; micro-batches are numbered from the beginning of the stream."""
        num_new = len(step.micro_batches)
        first = self._num_steps * num_new
        self._per_step = num_new
        if self._num_steps == 0:
            self._first_step = index
            self._part.strategy.begin_step()
        self._step = index + 1
        self._settings[index] = self._update.ask_later()
        oldest = first - self._stages.size - num_new
        kept = {number: micro for number, micro in self._micro_batches.items() if number >= oldest}
        new = {first + number: micro for number, micro in step.micro_batches.items()}
        self._micro_batches = kept | new
        actions = self._stream.step(self._num_steps)
        self._num_steps += 1
        window = PipelineStep(
            self._micro_batches, lambda number: step.seed(number - first), step.loss_divisor
        )
        return window, actions

    def drain(self) -> Sequence[Action]:
        actions = self._stream.drain(self._num_steps)
        self._num_steps = 0
        return actions

    def end_drain(self) -> None:
        self.versions.restart()

    def show_newest(self) -> None:
        self.versions.show_newest()

    def older_weights(self) -> list[Tensor]:
        return self.versions.stashed

    def totals(self, updated: LossTotals) -> LossTotals:
        """The loss of the window, which the last stage tells all. Collective.

        There is no norm: each stage updates by itself.
        """
        loss = self._pipeline.loss
        sums = torch.stack([loss.loss_sum, loss.count, loss.tokens])
        sums /= self._update.loss_copies
        self._ranks.all_reduce(sums, control=True).wait()
        self._stages.broadcast(sums, self._stages.size - 1).wait()
        if loss.num_graphs == 0 and float(loss.count) > 0:
            raise no_gradient(self._step)
        loss_sum, count, tokens = sums.tolist()
        totals = LossTotals(loss_sum, count, 0.0, tokens / count if count else 1.0)
        totals.check(self._step)
        return replace(totals, squared_norm=math.nan)

    def _forward(self, action: Action) -> None:
        self.versions.forward(index_of(action))
        before = self._pipeline.loss.count.clone()
        self._pipeline.forward(action)
        self._counts[index_of(action)] = self._pipeline.loss.count - before

    def _backward(self, action: Action) -> None:
        micro_batch = index_of(action)
        transport = self._pipeline.transport
        self.versions.backward(micro_batch)
        grads: list[Tensor | None] | None = None
        count = self._counts.pop(micro_batch)
        if self._stage < self._pipeline.num_stages - 1:
            grads = transport.take_gradients(self._stage, micro_batch)
            travelled = grads.pop()
            assert travelled is not None
            count = travelled
        found = self._part.stage.backward(micro_batch, grads)
        transport.put_gradients(self._stage, micro_batch, [*found, count])
        self._gathered.add_count(count)
        self._newest = micro_batch
        self._part.strategy.after_backward()
        self.versions.done(micro_batch)

    def _apply(self, action: Action) -> None:
        strategy = self._part.strategy
        for reduction in self._reductions:
            reduction()
        totals = self._update.totals(self._gathered, self._ranks, None, _sum)
        self.versions.before_update()
        if totals.count > 0:
            step = self._first_step + self._newest // self._per_step
            for earlier in [known for known in self._settings if known < step]:
                del self._settings[earlier]
            change = self._update.change(totals, step, totals.count)
            self._update.make(replace(change, settings=self._settings[step]))
        strategy.publish()
        self.versions.after_update()
        self._gathered.reset()
        strategy.begin_step()


def _sum(totals: Tensor, axis: Axis) -> None:
    axis.all_reduce(totals, control=True).wait()
