"""The stages of this rank at work: what each action of a schedule does, but for the update.

A step without a pipeline is one stage that neither sends nor receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.engine.balance import Balance
from plait.engine.batch import MicroBatch
from plait.engine.loss import LossFunction, LossSum
from plait.parallel.data import DataStrategy
from plait.parallel.pipeline.actions import Action, Kind
from plait.parallel.pipeline.payload import Payload
from plait.parallel.pipeline.random import RandomState
from plait.parallel.pipeline.runtime import Handler
from plait.parallel.pipeline.stage import Stage
from plait.parallel.pipeline.transport import Transport
from plait.parallel.tensor import TensorSplit


@dataclass(frozen=True)
class Part:
    """One stage of this rank, and the data strategy of its parameters."""

    stage: Stage
    strategy: DataStrategy


@dataclass(frozen=True)
class Step:
    """What the stages must know of the step under way."""

    micro_batches: Mapping[int, MicroBatch]
    seed: Callable[[int], int]  # of the random numbers of a micro-batch
    first: int = 0  # number of the first micro-batch among those of all data ranks

    def pairs(self) -> list[tuple[Any, Any]]:
        """The inputs and targets of every micro-batch."""
        return [(micro.inputs, micro.targets) for micro in self.micro_batches.values()]


class Pipeline:
    """The handlers of a schedule's actions."""

    def __init__(
        self,
        parts: Mapping[int, Part],
        num_stages: int,
        transport: Transport,
        loss: LossFunction,
        *,
        balance: Balance | None = None,
        split: TensorSplit | None = None,
    ) -> None:
        """`balance`: the routers of a model with experts; `split`: what a tensor axis made of
        it.
        """
        self._balance = balance
        self._split = split
        self.joined: frozenset[Action] = (
            frozenset()
        )  # weight gradients to be made with the next of their stage
        self.parts = dict(parts)
        self.num_stages = num_stages
        self.transport = transport
        self._device = next(iter(self.parts.values())).strategy.group.device
        self.loss = LossSum(self._device)
        self._loss_function = loss
        self.loss_scale = 1.0  # of the gradients of this step; the loss itself is reported as it is
        self._random = RandomState(self._device)
        self._step = Step({}, lambda micro_batch: 0)

    def handlers(self) -> dict[Kind, Handler]:
        """The table from kind to handler."""
        transport = self.transport
        return {
            Kind.UNSHARD: lambda action: self.parts[action.stage].strategy.begin_step(),
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRAD: self._input_grad,
            Kind.WEIGHT_GRAD: self._weight_grad,
            Kind.SEND_F: _moving(transport.send_output),
            Kind.RECV_F: _moving(transport.post_input),
            Kind.SEND_B: _moving(transport.send_gradients),
            Kind.RECV_B: _moving(transport.post_gradients),
        }

    def begin(self, step: Step) -> None:
        """A step begins."""
        self.loss.reset()
        self._enter_step(step, recording=True)
        self._begin_balance(step)

    def _begin_balance(self, step: Step) -> None:
        if self._balance is not None:
            self._balance.begin(list(step.micro_batches.values()), self.loss_scale)

    def _enter_step(self, step: Step, *, recording: bool) -> None:
        self._step = step
        self.transport.begin(
            lambda micro_batch: step.micro_batches[micro_batch].shapes, recording=recording
        )

    def end(self) -> None:
        """It has ended: nothing stays under way."""
        self.transport.finish()

    def forward(self, stage: int, micro_batch: int, *, recording: bool = True) -> Any:
        """One stage's part of a micro-batch; on the last, the output of the model."""
        part = self.parts[stage]
        micro = self._step.micro_batches[micro_batch]
        fresh = self._random.seed(self._step.seed(micro_batch))
        received = None
        if stage > 0:
            received = self.transport.take_input(stage, micro_batch)
            self._random.unpack(received)
        self._enter(micro_batch, recording=recording)
        part.strategy.before_forward()
        if recording:
            output = part.stage.forward(micro_batch, micro.inputs, received)
        else:
            output = part.stage.evaluate(micro.inputs, received)
        part.strategy.after_forward()
        if isinstance(output, Payload):
            self._random.pack(output, fresh)
            self.transport.put_output(stage, micro_batch, output)
        return output

    def evaluate(self, step: Step) -> LossSum:
        """The losses of a batch, forward only; nothing where the last stage is on another rank.

        A step of an asynchronous schedule that is under way goes on afterwards.
        """
        under_way = self._step
        loss = LossSum(self._device)
        self._begin_balance(step)
        self._enter_step(step, recording=False)
        for micro_batch in step.micro_batches:
            for stage in self.parts:
                self._evaluate_stage(stage, micro_batch, loss)
        self.end()
        self._enter_step(under_way, recording=True)
        return loss

    def _evaluate_stage(self, stage: int, micro_batch: int, loss: LossSum) -> None:
        transport = self.transport
        placement = transport.placement
        if stage > 0 and placement[stage - 1] != placement[stage]:
            transport.post_input(stage, micro_batch)
        output = self.forward(stage, micro_batch, recording=False)
        if stage == self.num_stages - 1:
            micro = self._step.micro_batches[micro_batch]
            loss.add(self._loss_function(output, micro.targets), micro.num_samples)
        elif placement[stage + 1] != placement[stage]:
            transport.send_output(stage, micro_batch)

    def _forward(self, action: Action) -> None:
        stage = action.stage
        micro_batch = index_of(action)
        output = self.forward(stage, micro_batch)
        if self._balance is not None:
            self.loss.add_auxiliary(self._balance.take_auxiliary())
        if stage == self.num_stages - 1:
            micro = self._step.micro_batches[micro_batch]
            found = self._loss_function(output, micro.targets)
            if self._balance is not None:
                self._balance.check(found)
            loss = self.loss.add(found, micro.num_samples, micro.tokens_per_sample)
            self.parts[stage].stage.keep(
                micro_batch, [loss if self.loss_scale == 1.0 else loss * self.loss_scale]
            )

    def _enter(self, micro_batch: int, *, recording: bool) -> None:
        """Tell what is not a function of its inputs alone which micro-batch comes: forward, or
        recomputed for backward.
        """
        if self._split is not None:
            self._split.enter(self._step.micro_batches[micro_batch].num_rows)
        if self._balance is not None:
            self._balance.enter(
                micro_batch, self._step.micro_batches[micro_batch], recording=recording
            )

    def _gradients(self, action: Action) -> list[Tensor] | None:
        last = action.stage == self.num_stages - 1
        return None if last else self.transport.take_gradients(action.stage, index_of(action))

    def _backward(self, action: Action) -> None:
        part = self.parts[action.stage]
        self._enter(index_of(action), recording=False)
        grads = part.stage.backward(index_of(action), self._gradients(action))
        self.transport.put_gradients(action.stage, index_of(action), grads)
        part.strategy.after_backward()

    def _input_grad(self, action: Action) -> None:
        part = self.parts[action.stage]
        self._enter(index_of(action), recording=False)
        grads = part.stage.input_grad(index_of(action), self._gradients(action))
        self.transport.put_gradients(action.stage, index_of(action), grads)
        part.strategy.after_backward(weight_grads=False)

    def _weight_grad(self, action: Action) -> None:
        part = self.parts[action.stage]
        later = action in self.joined
        part.stage.weight_grad(index_of(action), later=later)
        if not later:
            part.strategy.after_backward()


def index_of(action: Action) -> int:
    """The micro-batch of an action that has one."""
    return 0 if action.micro_batch is None else action.micro_batch


def _moving(act: Callable[[int, int], None]) -> Handler:
    def handler(action: Action) -> None:
        with torch.no_grad():
            act(action.stage, index_of(action))

    return handler
