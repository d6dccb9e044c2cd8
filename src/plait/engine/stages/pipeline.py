"""The stages of this rank at work: what each action of a schedule does, but for the update.

A step without a pipeline is one stage that neither sends nor receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.batch_trees import tensors_of
from plait.engine.batch import MicroBatch
from plait.engine.loss import LossFunction, LossSum
from plait.engine.stages.contexts import MicroBatchContext
from plait.errors import ModelError
from plait.parallel.data import DataStrategy
from plait.parallel.pipeline.actions import Action, Kind
from plait.parallel.pipeline.payload import Payload, RandomState
from plait.parallel.pipeline.runtime import Handler
from plait.parallel.pipeline.stage import Stage
from plait.parallel.pipeline.transport import Transport
from plait.values import PyTree


@dataclass(frozen=True)
class StageWithStrategy:
    """One stage of this rank, and the data strategy of its parameters."""

    stage: Stage
    strategy: DataStrategy


@dataclass(frozen=True)
class PipelineStep:
    """The step under way, as the stages see it.

    Attributes:
        micro_batches: the micro-batches of this rank, by number.
        seed: the seed of the random numbers of a micro-batch.
        loss_divisor: what the sum of the losses is divided by in backward; the loss itself is
            reported as it is. 0-dim where it is a tensor.
    """

    micro_batches: Mapping[int, MicroBatch]
    seed: Callable[[int], int]
    loss_divisor: float | Tensor = 1.0

    def pairs(self) -> list[tuple[object, object]]:
        """The inputs and targets of every micro-batch."""
        return [(micro.inputs, micro.targets) for micro in self.micro_batches.values()]


class Pipeline:
    """The handlers of a schedule's actions.

    Attributes:
        parts: the stages of this rank, by number.
        num_stages: stages on all ranks together.
        transport: sends and receives between stages.
        loss: the loss of the step so far.
        under_way: the micro-batch that an evaluation or a replay has come to.
        samples_under_way: how many samples that micro-batch has.
        loss_function: the user's loss on this rank's outputs.
    """

    def __init__(
        self,
        parts: Mapping[int, StageWithStrategy],
        num_stages: int,
        transport: Transport,
        loss: LossFunction,
        *,
        contexts: Sequence[MicroBatchContext] = (),
        batched: frozenset[Action] = frozenset(),
        random_is_own: bool = True,
    ) -> None:
        """Take the stages of a rank.

        `contexts` learn which micro-batch is under way. Weight gradients in `batched` are made
        together with the next ones of their stage. `random_is_own`: see `RandomState`.
        """
        self.parts = dict(parts)
        self.num_stages = num_stages
        self.transport = transport
        self._device = next(iter(self.parts.values())).strategy.group.device
        self.loss = LossSum(self._device)
        self.loss_function = loss
        self._contexts = tuple(contexts)
        self._batched = batched
        self._random = RandomState(self._device, is_own=random_is_own)
        self._step = PipelineStep({}, lambda micro_batch: 0)
        self.under_way = 0
        self.samples_under_way = 0

    def handlers(self) -> dict[Kind, Handler]:
        """The table from kind to handler."""
        transport = self.transport
        return {
            Kind.UNSHARD: lambda action: self.parts[action.stage].strategy.begin_step(),
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRAD: self._input_grad,
            Kind.WEIGHT_GRAD: self._weight_grad,
            Kind.SEND_F: _moving(transport.send_output),
            Kind.RECV_F: _moving(transport.post_input),
            Kind.SEND_B: _moving(transport.send_gradients),
            Kind.RECV_B: _moving(transport.post_gradients),
        }

    def begin(self, step: PipelineStep) -> None:
        """A step begins. Collective where a context asks for it."""
        self.loss.reset(step.loss_divisor)
        self._begin_contexts(step)
        self._enter_step(step, recording=True)

    @property
    def has_contexts(self) -> bool:
        """Whether modules are told which micro-batch is under way."""
        return bool(self._contexts)

    @property
    def has_drawn(self) -> bool:
        """Whether a layer drew random numbers since the last forward began."""
        return self._random.has_drawn

    def unseeded(self) -> AbstractContextManager[None]:
        """Leave the random state as it is, while a step that draws nothing is recorded."""
        return self._random.unseeded()

    def _begin_contexts(self, step: PipelineStep) -> None:
        for context in self._contexts:
            context.begin_step(list(step.micro_batches.values()), step.loss_divisor)

    def _enter_step(self, step: PipelineStep, *, recording: bool) -> None:
        self._step = step
        self.transport.begin(
            lambda micro_batch: step.micro_batches[micro_batch].shapes, recording=recording
        )

    def end(self) -> None:
        """The step has ended: nothing stays under way."""
        self.transport.finish()

    def evaluate(self, step: PipelineStep, functions: Sequence[LossFunction]) -> list[LossSum]:
        """Sums of the loss and of functions of (output, targets) over a batch, forward only.

        The sums are zero where the last stage is on another rank. A step of an asynchronous
        schedule that is under way goes on afterwards.
        """
        self._begin_contexts(step)
        return self._evaluate(step, [self.loss_function, *functions])

    def replay(self) -> LossSum:
        """The losses of the step under way again, forward only, from its seeds. Collective."""
        return self._evaluate(self._step, [self.loss_function])[0]

    def batches(self) -> list[tuple[int, Any, int]]:
        """The number, inputs and number of samples of each micro-batch of the step under way."""
        known = self._step.micro_batches.items()
        return [(index, micro.inputs, micro.num_samples) for index, micro in known]

    def _evaluate(self, step: PipelineStep, functions: Sequence[LossFunction]) -> list[LossSum]:
        interrupted = self._step
        sums = [LossSum(self._device) for _ in functions]
        self._enter_step(step, recording=False)
        for micro_batch in step.micro_batches:
            for stage, part in self.parts.items():
                output = self._evaluate_stage(stage, micro_batch)
                if stage == self.num_stages - 1:
                    micro = step.micro_batches[micro_batch]
                    for function, total in zip(functions, sums, strict=True):
                        measured = self._loss(function, stage, output, micro.targets)
                        total.add(measured, micro.own_samples)
                part.strategy.after_forward()  # losses may read views of parameters
        self.end()
        self._enter_step(interrupted, recording=True)
        return sums

    def _evaluate_stage(self, stage: int, micro_batch: int) -> PyTree:
        """The output of one stage, sent on where the next stage is on another rank."""
        transport = self.transport
        placement = transport.placement
        if stage > 0 and placement[stage - 1] != placement[stage]:
            transport.post_input(stage, micro_batch)
        micro = self._step.micro_batches[micro_batch]
        self.under_way = micro_batch
        self.samples_under_way = micro.num_samples
        received, seeded = self._begin_forward(stage, micro_batch, recording=False)
        output = self._run_stage(stage, micro.inputs, received)
        self._end_forward(stage, micro_batch, output, seeded)
        is_last = stage == self.num_stages - 1
        if not is_last and placement[stage + 1] != placement[stage]:
            transport.send_output(stage, micro_batch)
        return output

    def num_samples(self, action: Action) -> int:
        """The samples of the micro-batch of an action."""
        return self._step.micro_batches[index_of(action)].num_samples

    def forward(self, action: Action) -> None:
        """Run one stage on a micro-batch; on the last stage, the loss too."""
        stage = action.stage
        micro_batch = index_of(action)
        part = self.parts[stage].stage
        micro = self._step.micro_batches[micro_batch]
        received, seeded = self._begin_forward(stage, micro_batch, recording=True)
        output = self._run_stage(stage, micro.inputs, received)
        self.parts[stage].strategy.after_forward()
        self._end_forward(stage, micro_batch, output, seeded)
        if stage < self.num_stages - 1:
            self._after_forward(None)
            part.keep(micro_batch, received, output.tensors, output.unread)
            return
        loss = self._loss(self.loss_function, stage, output, micro.targets)
        self._after_forward(loss)
        total = self.loss.add(loss, micro.own_samples, micro.tokens_per_sample)
        part.keep(micro_batch, received, [total])

    def _run_stage(self, stage: int, inputs: PyTree, received: Payload | None) -> PyTree:
        """The output of a stage. After one that breaks no forward is under way."""
        part = self.parts[stage]
        try:
            return part.stage.module.forward(inputs, received)
        except BaseException:
            part.strategy.group.running_forward.end()
            raise

    def _loss(self, function: LossFunction, stage: int, output: PyTree, targets: PyTree) -> PyTree:
        """The loss of a micro-batch. It may read parameters, as a penalty on their norms does."""
        with self.parts[stage].strategy.group.running_forward.during(), ExitStack() as hooks:
            if self.num_stages > 1:
                for leaf in tensors_of(output):
                    if leaf.is_leaf and leaf.requires_grad:
                        hooks.callback(leaf.register_hook(_refuse_gradient).remove)
            return function(output, targets)

    def _begin_forward(
        self, stage: int, micro_batch: int, *, recording: bool
    ) -> tuple[Payload | None, Tensor]:
        """The input from the stage before, and the state of the random numbers of the seed."""
        seeded = self._random.seed(self._step.seed(micro_batch))
        received = None
        if stage > 0:
            received = self.transport.take_input(stage, micro_batch)
            self._random.unpack(received)
        self._enter(micro_batch, stage, recording=recording)
        self.parts[stage].strategy.before_forward()
        return received, seeded

    def _end_forward(self, stage: int, micro_batch: int, output: object, seeded: Tensor) -> None:
        if isinstance(output, Payload):
            self._random.pack(output, seeded)
            self.transport.put_output(stage, micro_batch, output)

    def _after_forward(self, loss: PyTree) -> None:
        for context in self._contexts:
            context.after_forward(self.loss, loss)

    def _enter(self, micro_batch: int, stage: int, *, recording: bool) -> None:
        """Tell the contexts which micro-batch comes: forward, or recomputed for backward."""
        micro = self._step.micro_batches[micro_batch]
        for context in self._contexts:
            context.enter(micro_batch, micro, stage, recording=recording)

    def _gradients(self, action: Action) -> list[Tensor | None] | None:
        last = action.stage == self.num_stages - 1
        return None if last else self.transport.take_gradients(action.stage, index_of(action))

    def _backward(self, action: Action) -> None:
        part = self.parts[action.stage]
        self._enter(index_of(action), action.stage, recording=False)
        grads = part.stage.backward(index_of(action), self._gradients(action))
        self.transport.put_gradients(action.stage, index_of(action), grads)
        part.strategy.after_backward()

    def _input_grad(self, action: Action) -> None:
        part = self.parts[action.stage]
        self._enter(index_of(action), action.stage, recording=False)
        grads = part.stage.input_grad(index_of(action), self._gradients(action))
        self.transport.put_gradients(action.stage, index_of(action), grads)
        part.strategy.after_backward(weight_grads=False)

    def _weight_grad(self, action: Action) -> None:
        part = self.parts[action.stage]
        later = action in self._batched
        part.stage.weight_grad(index_of(action), later=later)
        if not later:
            part.strategy.after_backward()


def _refuse_gradient(_: Tensor) -> None:
    """Refuse a gradient that a loss takes of a tensor of other stages, whose graph is not here."""
    raise ModelError(
        "the loss takes a gradient itself (torch.autograd.grad or backward) of a tensor that an "
        "earlier part of the model made, as a gradient penalty does, and a pipeline has the graph "
        "of each stage on its own; take pp out of the plan: dp, zero3 and mb train such a model"
    )


def index_of(action: Action) -> int:
    """The micro-batch of an action that has one."""
    return 0 if action.micro_batch is None else action.micro_batch


def _moving(act: Callable[[int, int], None]) -> Handler:
    def handler(action: Action) -> None:
        with torch.no_grad():
            act(action.stage, index_of(action))

    return handler
