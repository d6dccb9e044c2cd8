"""One rank's training step: forwards and backwards, and at its end the update.

A table maps each kind of action to a handler. A step without a pipeline is the schedule with one
stage, so there is no other path: `0UNSHARD 0F0 0B0 0F1 0REDUCE 0B1 0U`. `Engine.step` does all of
it in one call, `OpenStep` one part after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from plait.doctor.flight import Phase
from plait.engine.axes import within_stage
from plait.engine.deferral import PendingStep, StepReadout
from plait.engine.explain import (
    Explainer,
    explained,
    inner_gradient_error,
    step_errors,
    whole_sequences_error,
)
from plait.engine.graphs import StepGraphs
from plait.engine.loss import LossFunction, LossSum, MetricSum, summed
from plait.engine.modes import TrainingModes
from plait.engine.parts import EngineParts
from plait.engine.seeds import derive_seed, own_random_state
from plait.engine.stages.pipeline import PipelineStep
from plait.engine.state.computed_buffers import ComputedBuffers
from plait.engine.state.counters import CountedForwards
from plait.engine.state.written_by_forwards import WrittenByForwards
from plait.engine.step import Outcome, StepNumbers
from plait.engine.step_update import StepUpdate
from plait.origin import batch_norm_error
from plait.parallel.pipeline.actions import Action, Kind
from plait.parallel.pipeline.runtime import Handler, execute
from plait.trace import Timeline
from plait.values import JsonMapping, PyTree


class TrainingStep:
    """The step of one rank, which is made again and again.

    Attributes:
        index: steps that were made.
        timing: when the gradients of a step become an update.
        update: the sums over the ranks, the decision and the update.
    """

    def __init__(
        self,
        parts: EngineParts,
        modes: TrainingModes,
        wait_for_copies: Callable[[], None],
        observe: Callable[[], None],
        is_observed: Callable[[], bool],
        *,
        before_norm: Sequence[Callable[[], None]],
    ) -> None:
        """Take the parts of an engine; `StepUpdate` says what the functions are for."""
        self.index = parts.driver.first_step
        self.timing = parts.timing
        self._expected_count = parts.expected_count
        self._loss_divisor: float | Tensor = 1.0
        self.update = StepUpdate(
            parts,
            modes.weights,
            wait_for_copies=wait_for_copies,
            observe=observe,
            is_observed=is_observed,
            before_norm=before_norm,
            make_again=self._make_again,
        )
        self._world = parts.world
        self._model = parts.model
        self._modes = modes
        self._driver = parts.driver
        self._loss_copies = parts.update.loss_copies
        self._splitter = parts.splitter
        self._pipeline = parts.pipeline
        self._seed = parts.seed
        self._stages = parts.world.axis("pp")
        self._within_stage = within_stage(parts.world)
        self._computed = ComputedBuffers(
            parts.holding,
            parts.loss_modules,
            parts.world,
            together=parts.driver.is_synchronous,
        )
        data, tensor = parts.world.axis("dp").rank, parts.world.axis("tp").rank
        self._counted = CountedForwards(
            parts.model,
            parts.loss_modules,
            parts.plan.text_with_micro_batches,
            tells=data == 0 and tensor == 0,
        )
        self._written = WrittenByForwards(
            parts.holding, parts.loss_modules, parts.strategy, parts.plan, parts.world
        )
        self._updates_left = 0
        table = {
            **parts.pipeline.handlers(),
            Kind.FORWARD: self._forward,
            Kind.REDUCE: self.update.before_last_backward,
            Kind.UPDATE: self._update,
        }
        self._handlers = parts.timing.handlers(table)
        self._graphs = parts.graphs
        self._explainers: list[Explainer] = [batch_norm_error(parts.model)]
        self._explainers.append(whole_sequences_error(parts.plan.cp.size))
        if parts.plan.pp.size > 1:
            self._explainers.append(inner_gradient_error(parts.model))
        if parts.split is not None:
            self._explainers.append(partial(parts.split.explain, parts.model))

    def begin(
        self, batch: PyTree, call: int = 0, *, counts: bool = True, may_defer: bool = False
    ) -> tuple[PipelineStep, Sequence[Action]]:
        """Take this rank's share of a batch; the micro-batches and actions of the step. Collective.

        `call` counts the batches whose gradients are added up before one update. `counts`: backward
        divides by the count of this batch, else by that of the one before. `may_defer`: the host
        may read the step later, where no caller looks at gradients.
        """
        self._world.recorder.flight.enter(Phase.STEPPING)
        self.update.begin_batch(may_defer=may_defer)
        self._modes.train()
        if not call:
            self.update.begin()
            self._computed.before_step()
        step = self._of(batch, call)
        if counts:
            micro_batches = list(step.micro_batches.values())
            count = 1.0 if self._expected_count is None else self._expected_count.of(micro_batches)
            self._loss_divisor = count / self.update.scale.value
        step = replace(step, loss_divisor=self._loss_divisor)
        step, actions = self.timing.begin(step, self.index)
        if not call:
            self._driver.before_step()
        self._pipeline.begin(step)
        self._counted.begin(len(step.micro_batches))
        self._written.begin(len(step.micro_batches))
        return step, actions

    def execute(
        self, actions: Sequence[Action], timeline: Timeline, step: PipelineStep | None = None
    ) -> None:
        """Do actions of a step that has begun; without one, those that steps have left over.
        Collective.
        """
        name = "the flush" if step is None else f"step {self.index + 1}"
        pairs = None if step is None else step.pairs()
        data_ranks = self._world.axis("dp").size
        explainers = [
            *self._explainers,
            *step_errors(self._model, pairs, self._world.rank, data_ranks, name),
        ]
        self._updates_left = sum(action.kind is Kind.UPDATE for action in actions)
        with explained(*explainers), own_random_state(self._world.device):
            begin = self._world.recorder.flight.action
            optional = frozenset({Kind.RESHARD})
            act = partial(execute, timeline=timeline, optional=optional, begin=begin)
            if self._graphs is None or step is None:
                act(actions, self._handlers)
            else:
                act(self._recorded(self._graphs, step, actions, act), self._handlers)
            self._pipeline.end()
        self._counted.end()
        self._written.end()

    def _recorded(
        self,
        graphs: StepGraphs,
        step: PipelineStep,
        actions: Sequence[Action],
        act: Callable[[Sequence[Action], Mapping[Kind, Handler]], None],
    ) -> Sequence[Action]:
        """Do what comes before the update, by a graph where that is a whole step; the rest."""
        before = [action for action in actions if action.kind is not Kind.UPDATE]
        handlers: Mapping[Kind, Handler] = self._handlers
        with graphs.beside():
            if len(before) < len(actions):
                handlers = graphs.handlers(step, before, handlers)
            act(before, handlers)
        return actions[len(before) :]

    def end(self, step: PipelineStep, actions: Sequence[Action]) -> Outcome:
        """The step has been executed; what comes of it. Collective."""
        outcome = self.update.deferred_outcome(self.index, step, actions)
        if outcome is None:
            outcome = Outcome()
            outcome.tell(self._decided())
            return outcome
        self.update.read_pending(left=1)  # the doctor sees this wait inside the step
        if not outcome.is_told:  # else it was made again, and is done
            self._advance()
        return outcome

    def decide(self, factor: float) -> None:
        """Update by the gradients of a step times `factor`, where it counts. Collective.

        An optimizer draws from the step's random numbers, not from the caller's.
        """
        with own_random_state(self._world.device):
            self.update.decide(self.index, factor)

    def finish(self) -> bool:
        """The step is made; whether its update was left out."""
        self._advance()
        return self.update.finish()

    def _decided(self) -> StepNumbers:
        """The numbers of a step that the host has decided on. Collective."""
        return self.update.decided(skipped=self.finish())

    def _advance(self) -> None:
        self.index += 1
        self._world.recorder.flight.step_done(self.index)

    def _make_again(self, made: PendingStep, refused: StepReadout | None) -> None:
        """Make a step again, on which the host decides. Collective.

        `refused`: its readout, where the device has left it out.
        """
        if not self.update.begin_again(refused):
            return
        self.index = made.index
        self._modes.train()
        self._driver.before_step()
        self._pipeline.begin(made.step)
        with torch.inference_mode(False), torch.enable_grad():
            self.execute(made.actions, Timeline(self._world.rank, enabled=False), made.step)
        made.outcome.tell(self._decided())

    def flush(self) -> None:
        """Do the actions that past steps have left over, with their updates. Collective."""
        actions = self.timing.drain()
        self.execute(actions, Timeline(self._world.rank, enabled=False))
        self.timing.end_drain()

    def measure(self, batch: PyTree, functions: Sequence[LossFunction]) -> list[MetricSum]:
        """The sums of the loss and of functions over all ranks' shares of a batch, forward only.
        Collective.
        """
        self._modes.eval()
        self.timing.show_newest()
        flight = self._world.recorder.flight
        with flight.during(Phase.EVALUATING), own_random_state(self._world.device):
            measured = self._pipeline.evaluate(self._of(batch), functions)
        return self.over_ranks(measured)

    def resume(self, meta: JsonMapping) -> None:
        """Go on from the step and the scale of the loss that a checkpoint's meta data has."""
        self.index = meta["step"]
        self.update.scale.load_meta(meta)

    @property
    def loss(self) -> LossSum:
        """This rank's losses of the batches that were taken since the last update."""
        return self._pipeline.loss

    def over_ranks(self, sums: Sequence[LossSum]) -> list[MetricSum]:
        """The sums of all ranks together. Collective."""
        return summed(sums, self._loss_copies, (self._within_stage, self._stages))

    def _of(self, batch: PyTree, call: int = 0) -> PipelineStep:
        micro_batches = self._splitter.split(batch)
        rank, size = self._world.worker
        first = (call * size + rank) * len(micro_batches)
        return PipelineStep(
            dict(enumerate(micro_batches)),
            lambda number: derive_seed(self._seed, "step", self.index, first + number),
        )

    def _forward(self, action: Action) -> None:
        samples = self._pipeline.num_samples(action)
        forward = partial(self._written.during, partial(self._pipeline.forward, action))
        self._counted.during(forward, samples)

    def _update(self, action: Action) -> None:
        self._updates_left -= 1
        if not self._updates_left:  # one for each stage: the last of them updates all
            self.update.make(self.index)
