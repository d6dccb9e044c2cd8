"""One rank's training step: forwards and backwards, sums over the ranks, the update.

A table maps each kind of action to a handler. A step without a pipeline is the schedule with one
stage, so there is no other path: `0UNSHARD 0F0 0B0 0F1 0REDUCE 0B1 0U`. `Engine.step` does all of
it in one call, `OpenStep` one part after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from plait.doctor.flight import Phase
from plait.engine.axes import within_stage
from plait.engine.balance import Load
from plait.engine.deferral import PendingStep, PendingSteps, StepReadout
from plait.engine.explain import Explainer, explained, inner_gradient_error, step_errors
from plait.engine.graphs import StepGraphs
from plait.engine.loss import LossFunction, LossSum, LossTotals, MetricSum, summed
from plait.engine.modes import TrainingModes
from plait.engine.parts import EngineParts
from plait.engine.seeds import derive_seed, own_random_state
from plait.engine.stages.pipeline import PipelineStep
from plait.engine.step import Outcome, StepNumbers
from plait.engine.sums import StepSums, check_orders, totals_of
from plait.engine.suspect import Suspect
from plait.origin import batch_norm_error
from plait.outer import Change
from plait.parallel.pipeline.actions import Action, Kind
from plait.parallel.pipeline.runtime import Handler, execute
from plait.trace import Timeline
from plait.values import JsonMapping, PyTree


class TrainingStep:
    """The step of one rank, which is made again and again.

    Attributes:
        index: steps that were made.
        totals: the sums over all ranks of the last step.
        scale: the scale of the loss in backward.
        timing: when the gradients of a step become an update.
    """

    def __init__(
        self,
        parts: EngineParts,
        modes: TrainingModes,
        wait_for_copies: Callable[[], None],
        observe: Callable[[], None],
        is_observed: Callable[[], bool],
    ) -> None:
        """Take the parts of an engine.

        `wait_for_copies` returns when no copy of the state is under way any more, and comes before
        the sums over ranks. `observe` comes before each update; `is_observed` says whether a caller
        looks at gradients there.
        """
        self.index = parts.driver.first_step
        self.totals = LossTotals(0.0, 1.0, 0.0)
        self.scale = parts.scale
        self.timing = parts.timing
        self._world = parts.world
        self._model = parts.model
        self._modes = modes
        self._strategy = parts.strategy
        self._driver = parts.driver
        self._updater = parts.update
        self._splitter = parts.splitter
        self._pipeline = parts.pipeline
        self._guard = parts.guard
        self._seed = parts.seed
        self._mean_of_workers = parts.mean_of_workers
        self._data_ranks = parts.world.axis("dp")
        self._stages = parts.world.axis("pp")
        self._within_stage = within_stage(parts.world)
        self._loss_scale = parts.scale.value
        self._suspect = Suspect(
            parts.world,
            parts.model,
            parts.pipeline,
            parts.strategy,
            together=parts.driver.is_synchronous,
        )
        self._reductions = (wait_for_copies, *parts.reductions)
        self._observe = observe
        self._is_observed = is_observed
        self._deferral = parts.deferral
        self._pending = PendingSteps(self._take, self._make_again)
        self._defers = False
        self._sums: StepSums | None = None
        self._num_loads = 0
        self._refused: StepReadout | None = None
        self._balance = parts.balance
        self._updates_left = 0
        table = {
            **parts.pipeline.handlers(),
            Kind.REDUCE: self._reduce,
            Kind.UPDATE: self._update,
        }
        self._handlers = parts.timing.handlers(table)
        self._graphs = parts.graphs
        self._explainers: list[Explainer] = [batch_norm_error(parts.model)]
        if parts.plan.pp.size > 1:
            self._explainers.append(inner_gradient_error(parts.model))
        if parts.split is not None:
            self._explainers.append(partial(parts.split.explain, parts.model))

    def begin(
        self, batch: PyTree, call: int = 0, *, may_defer: bool = False
    ) -> tuple[PipelineStep, Sequence[Action]]:
        """Take this rank's share of a batch; the micro-batches and actions of the step. Collective.

        `call` counts the batches whose gradients are added up before one update. `may_defer`: the
        host may read the step later, where no caller looks at gradients.
        """
        self._world.recorder.flight.enter(Phase.STEPPING)
        self._sums = None
        self._defers = may_defer and self.may_defer
        if not self._defers:
            self.read_pending()
        self._modes.train()
        if not call:
            self._guard.begin(self._model, keeps=self._defers and self._balance is not None)
            self._loss_scale = self.scale.value
        step, actions = self.timing.begin(self._of(batch, call), self.index)
        if not call:
            self._driver.before_step()
        self._pipeline.begin(step)
        return step, actions

    def execute(
        self, actions: Sequence[Action], timeline: Timeline, step: PipelineStep | None = None
    ) -> None:
        """Do actions of a step that has begun; without one, those that steps have left over.
        Collective.
        """
        name = "the flush" if step is None else f"step {self.index + 1}"
        pairs = None if step is None else step.pairs()
        explainers = [*self._explainers, *step_errors(self._model, pairs, self._world.rank, name)]
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
        if self._sums is None:
            outcome = Outcome()
            outcome.tell(self._decided())
            return outcome
        outcome = Outcome(lambda: self._looked_at(made))
        kept = self._sums, self._num_loads, self._guard.buffers, outcome
        made = PendingStep(self.index, step, actions, *kept)
        self._sums = None
        self._pending.add(made)
        self.read_pending(left=1)  # the doctor sees this wait inside the step
        if not outcome.is_told:  # else it was made again, and is done
            self._advance()
        return outcome

    def _looked_at(self, made: PendingStep) -> StepNumbers:
        """The numbers of a step, before the host has decided."""
        readout = made.read()
        totals = totals_of(readout.values)
        return self._numbers(totals, self._load_of(readout), skipped=readout.blocked)

    def _load_of(self, readout: StepReadout) -> Load | None:
        return None if self._balance is None else self._balance.load_of(readout.loads)

    def _decided(self) -> StepNumbers:
        """The numbers of a step that the host has decided on. Collective."""
        self.totals = self.timing.totals(self.totals)
        skipped = self.finish()
        load = None if self._balance is None else self._balance.load
        return self._numbers(self.totals, load, skipped=skipped)

    def _numbers(self, totals: LossTotals, load: Load | None, *, skipped: bool) -> StepNumbers:
        report = self._driver.report(totals.loss_sum, totals.count)
        return StepNumbers(
            loss=report.loss_sum / report.count if report.count else math.nan,
            grad_norm=self._norm(totals),
            tokens=round(report.tokens * totals.tokens_per_count),
            count=report.count,
            load=load,
            skipped=skipped,
        )

    def read_pending(self, left: int = 0) -> None:
        """Read the sums of all steps but the `left` newest. Collective.

        Errors: those of `update`, for a step that the device has left out.
        """
        self._pending.resolve(left)

    def _take(self, made: PendingStep, readout: StepReadout) -> None:
        """Take what the device has said of a step that counts."""
        check_orders(readout.values, made.sums.layout)
        self.totals = totals = totals_of(readout.values)
        sizes = partial(readout.sizes, max(self._pipeline.parts))
        self._guard.judge(totals, made.index + 1, self._suspect, sizes=sizes)
        load = None if self._balance is None else self._balance.take_load(readout.loads)
        made.outcome.tell(self._numbers(totals, load, skipped=False))

    def _make_again(self, made: PendingStep, refused: StepReadout | None) -> None:
        """Make a step again while the host decides. Collective.

        `refused`: its readout, if it did not count. Nothing is made where the run goes
        back to an earlier state.
        """
        assert self._deferral is not None
        self._deferral.reopen()
        if self._guard.rolls_back:
            return
        self.index = made.index
        self._modes.train()
        self._guard.begin(self._model, keeps=self._balance is not None)
        self._driver.before_step()
        self._pipeline.begin(made.step)
        self._defers = False
        self._refused = refused
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self.execute(made.actions, Timeline(self._world.rank, enabled=False), made.step)
        finally:
            self._refused = None
        made.outcome.tell(self._decided())

    def finish(self) -> bool:
        """The step is made; whether its update was left out."""
        self._advance()
        self.scale.adapt()
        return self.scale.skipped or self._guard.skipped

    def _advance(self) -> None:
        self.index += 1
        self._world.recorder.flight.step_done(self.index)

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
        self.scale.load_meta(meta)

    @property
    def loss(self) -> LossSum:
        """This rank's losses of the batches that were taken since the last update."""
        return self._pipeline.loss

    def over_ranks(self, sums: Sequence[LossSum]) -> list[MetricSum]:
        """The sums of all ranks together. Collective."""
        copies = self._updater.loss_copies
        return summed(sums, copies, (self._within_stage, self._stages))

    def divisor(self, totals: LossTotals | None = None) -> float:
        """The number by which summed gradients become those of the mean loss.

        `totals` are those of the step; without them, of the last one.
        """
        count = (totals or self._newest()).count
        return (1.0 if self._mean_of_workers else count) * self._loss_scale

    def grad_norm(self) -> float:
        """The global norm of the gradient of the mean loss."""
        return self._norm(self._newest())

    def _newest(self) -> LossTotals:
        """The totals of the last step, also where the host has not read them."""
        newest = self._pending.newest
        return self.totals if newest is None else totals_of(newest.read().values)

    def _norm(self, totals: LossTotals) -> float:
        return float(totals.squared_norm**0.5) / (self.divisor(totals) or 1.0)

    def sum_gradients(self) -> None:
        """Sum gradients and scalars over the ranks, before an update. Collective."""
        for reduction in self._reductions:
            reduction()
        self.totals = self._updater.totals(
            self._pipeline.loss, self._within_stage, self._stages, self._driver.sum_totals
        )

    def update(self, factor: float = 1.0) -> None:
        """Update by the gradients that were summed, times `factor`. Collective.

        Errors: `NonFiniteLoss`; the parameters are then those before the step.
        """
        step = self.index + 1
        dropped = not self.scale.judge(self.totals.squared_norm, step)
        counts = self._guard.judge(self.totals, step, self._suspect, norm=not dropped)
        if counts and self._refused is not None:
            refused, self._refused = self._refused, None
            counts = self._guard.refuse_passing(
                totals_of(refused.values), step, refused.losses, self._world
            )
        dropped |= not counts
        if dropped:
            self._strategy.publish()
        else:
            self._observe()
            self._modes.weights.train()  # an evaluation may have come between
            change = self._updater.change(self.totals, self.index, self.divisor() / factor)
            self._driver.apply(change)
        if self._balance is not None:
            self._balance.after_update()

    def _of(self, batch: PyTree, call: int = 0) -> PipelineStep:
        micro_batches = self._splitter.split(batch)
        rank, size = self._world.worker
        first = (call * size + rank) * len(micro_batches)
        return PipelineStep(
            dict(enumerate(micro_batches)),
            lambda number: derive_seed(self._seed, "step", self.index, first + number),
            self._loss_scale,
        )

    def _reduce(self, action: Action) -> None:
        loss = self._pipeline.loss
        weight = loss.worker_weight(self._data_ranks.size) if self._mean_of_workers else None
        self._pipeline.parts[action.stage].strategy.before_last_backward(weight)

    def _update(self, action: Action) -> None:
        self._updates_left -= 1
        if self._updates_left:  # one for each stage: the last of them updates all
            return
        if self._defers:
            self._update_on_device()
        else:
            self.sum_gradients()
            self.update()

    def _update_on_device(self) -> None:
        """Sum and update, as the device decides. The host reads where a parameter has no gradient
        here, as it cannot tell whether it has one elsewhere. Collective.
        """
        assert self._deferral is not None
        for reduction in self._reductions:
            reduction()
        loss, ranks = self._pipeline.loss, self._within_stage
        sums = self._updater.sums(loss, ranks, self._stages, self._driver.sum_totals)
        if not all(sums.layout.used):
            own = ranks.size == 1
            values = [0.0, 0.0, 0.0, 0.0, *sums.layout.numbers(loss.num_graphs)]
            self._updater.drop_unused(values if own else sums.read(), sums.layout)
        decided = self._deferral.decide(sums)
        self._driver.apply(Change(self.index, 1.0, on_device=decided))
        loads = [] if self._balance is None else [self._balance.sum_loads()]
        self._deferral.send(sums, decided, loss, *loads)
        self._sums = sums
        self._num_loads = sum(one.numel() for one in loads)

    @property
    def may_defer(self) -> bool:
        """Whether the device may decide on the next step.

        It may not where a caller looks at gradients, or the host acts on the load of experts.
        """
        acts = self._balance is not None and self._balance.needs_host
        return self._deferral is not None and not self._is_observed() and not acts
