"""The end of one rank's step: sums over the ranks, whether the step counts, the update.

The host decides before the update. Or the device does, and the host reads of it a step later
(`plait.engine.deferral`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from plait.engine.axes import within_stage
from plait.engine.balance import Load
from plait.engine.deferral import PendingStep, PendingSteps, StepReadout
from plait.engine.loss import LossTotals
from plait.engine.parts import EngineParts
from plait.engine.stages.pipeline import PipelineStep
from plait.engine.step import Outcome, StepNumbers
from plait.engine.sums import NUM_GRAPHS, StepSums, check_orders, totals_of
from plait.engine.suspect import Suspect
from plait.engine.weight_modes import WeightModes
from plait.outer import Change
from plait.parallel.pipeline.actions import Action

MakeAgain = Callable[[PendingStep, StepReadout | None], None]


class StepUpdate:
    """The update of an engine's steps, with the decision before it.

    Attributes:
        totals: the sums over all ranks of the last step that the host has read.
        scale: the scale of the loss in backward.
    """

    def __init__(
        self,
        parts: EngineParts,
        weights: WeightModes,
        *,
        wait_for_copies: Callable[[], None],
        observe: Callable[[], None],
        is_observed: Callable[[], bool],
        before_norm: Sequence[Callable[[], None]],
        make_again: MakeAgain,
    ) -> None:
        """Take the parts of an engine.

        `wait_for_copies` returns when no copy of the state is under way any more, and comes before
        the sums over ranks. `observe` comes before each update; `is_observed` says whether a caller
        looks at gradients there. `before_norm` are those that change the summed gradients.
        `make_again` makes a step again that the device left out.
        """
        self.totals = LossTotals(0.0, 1.0, 0.0)
        self.scale = parts.scale
        self._model = parts.model
        self._world = parts.world
        self._data_ranks = parts.world.axis("dp")
        self._stages = parts.world.axis("pp")
        self._within_stage = within_stage(parts.world)
        self._pipeline = parts.pipeline
        self._timing = parts.timing
        self._strategy = parts.strategy
        self._driver = parts.driver
        self._updater = parts.update
        self._guard = parts.guard
        self._balance = parts.balance
        self._deferral = parts.deferral
        self._mean_of_workers = parts.mean_of_workers
        self._weights = weights
        self._reductions = (wait_for_copies, *parts.reductions)
        self._observe = observe
        self._is_observed = is_observed
        self._before_norm = before_norm
        self._suspect = Suspect(
            parts.world,
            parts.model,
            parts.pipeline,
            parts.strategy,
            together=parts.driver.is_synchronous,
        )
        self._pending = PendingSteps(self._take, make_again)
        self._defers = False
        self._sums: StepSums | None = None
        self._num_loads = 0
        self._refused: StepReadout | None = None

    @property
    def may_defer(self) -> bool:
        """Whether the device may decide on the next step.

        It may not where a caller looks at gradients, or the host acts on the load of experts.
        """
        acts = self._balance is not None and self._balance.needs_host
        return self._deferral is not None and not self._is_observed() and not acts

    def begin_batch(self, *, may_defer: bool) -> None:
        """A batch comes. The host reads earlier steps first, unless the device decides on this one.
        Collective.
        """
        self._sums = None
        self._defers = may_defer and self.may_defer
        if not self._defers:
            self.read_pending()

    def begin(self) -> None:
        """A step begins. Errors: those of `Guard.begin`."""
        self._refused = None
        self._guard.begin(self._model, keeps=self._defers and self._balance is not None)

    def begin_again(self, refused: StepReadout | None) -> bool:
        """A step begins again, on which the host decides; whether it is to be made at all.

        It is not where the run goes back to an earlier state. `refused`: its readout, where the
        device has left it out.
        """
        assert self._deferral is not None
        self._deferral.reopen()
        if self._guard.rolls_back:
            return False
        self._defers = False
        self._refused = refused
        self._guard.begin(self._model, keeps=self._balance is not None)
        return True

    def before_last_backward(self, action: Action) -> None:
        """The next backward of a stage is its last one of the step."""
        loss = self._pipeline.loss
        weight = loss.worker_weight(self._data_ranks.size) if self._mean_of_workers else None
        self._pipeline.parts[action.stage].strategy.before_last_backward(weight)

    def sum_gradients(self) -> None:
        """Sum gradients and scalars over the ranks, before an update. Collective."""
        for reduction in self._reductions:
            reduction()
        self.totals = self._updater.totals(
            self._pipeline.loss,
            self._within_stage,
            self._stages,
            self._driver.sum_totals,
            drops_unused=not self._before_norm,
        )
        if self._before_norm:
            for change in self._before_norm:
                change()
            ranks = self._within_stage if self._driver.is_synchronous else None
            norm = self._updater.squared_norm(ranks, self._stages)
            self.totals = replace(self.totals, squared_norm=norm)

    def decide(self, index: int, factor: float = 1.0) -> None:
        """Update by the gradients that were summed, times `factor`, where the step counts.
        Collective.

        Errors: `NonFiniteLoss`; the parameters are then those before the step.
        """
        if self._counts(index + 1):
            self._observe()
            self._weights.train()  # an evaluation may have come between
            change = self._updater.change(self.totals, index, self.divisor() / factor)
            self._driver.apply(change)
        else:
            self._strategy.publish()
        if self._balance is not None:
            self._balance.after_update()

    def _counts(self, step: int) -> bool:
        """Whether the host lets a step count. Collective where it does not."""
        fits = self.scale.judge(self.totals.squared_norm, step)
        counts = self._guard.judge(self.totals, step, self._suspect, norm=fits)
        if counts and self._refused is not None:
            refused, self._refused = self._refused, None
            counts = self._guard.refuse_passing(
                totals_of(refused.values), step, refused.losses, self._world
            )
        return fits and counts

    def decide_on_device(self, index: int) -> None:
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
            values = [0.0] * NUM_GRAPHS + sums.layout.numbers(loss.num_graphs)
            self._updater.drop_unused(values if own else sums.read(), sums.layout)
        decided = self._deferral.decide(sums)
        self._driver.apply(Change(index, 1.0, on_device=decided))
        loads = [] if self._balance is None else [self._balance.sum_loads()]
        self._deferral.send(sums, decided, loss, *loads)
        self._sums = sums
        self._num_loads = sum(one.numel() for one in loads)

    def make(self, index: int) -> None:
        """Sum, decide and update, on the device or on the host. Collective."""
        if self._defers:
            self.decide_on_device(index)
        else:
            self.sum_gradients()
            self.decide(index)

    def deferred_outcome(
        self, index: int, step: PipelineStep, actions: Sequence[Action]
    ) -> Outcome | None:
        """The outcome of a step on which the device decided; None where the host did."""
        if self._sums is None:
            return None
        outcome = Outcome(lambda: self._looked_at(made))
        kept = self._sums, self._num_loads, self._guard.buffers, outcome
        made = PendingStep(index, step, actions, *kept)
        self._sums = None
        self._pending.add(made)
        return outcome

    def read_pending(self, left: int = 0) -> None:
        """Read the sums of all steps but the `left` newest. Collective.

        Errors: those of `decide`, for a step that the device has left out.
        """
        self._pending.resolve(left)

    def finish(self) -> bool:
        """The step on which the host decided is made; whether its update was left out."""
        self.scale.adapt()
        return self.scale.skipped or self._guard.skipped

    def decided(self, *, skipped: bool) -> StepNumbers:
        """The numbers of the step on which the host decided. Collective."""
        self.totals = self._timing.totals(self.totals)
        load = None if self._balance is None else self._balance.load
        return self._numbers(self.totals, load, skipped=skipped)

    def divisor(self, totals: LossTotals | None = None) -> float:
        """The number by which summed gradients become those of the mean loss.

        `totals` are those of the step; without them, of the last one.
        """
        known = totals or self._newest()
        return 1.0 / known.loss_divisor if self._mean_of_workers else known.gradient_divisor

    @property
    def loss_divisor(self) -> float:
        """The number by which the last step's backward has divided the sum of the losses."""
        return self._newest().loss_divisor

    def grad_norm(self) -> float:
        """The global norm of the gradient of the mean loss."""
        return self._norm(self._newest())

    def _newest(self) -> LossTotals:
        """The totals of the last step, also where the host has not read them."""
        newest = self._pending.newest
        return self.totals if newest is None else totals_of(newest.read().values)

    def _norm(self, totals: LossTotals) -> float:
        return float(totals.squared_norm**0.5) / (self.divisor(totals) or 1.0)

    def _take(self, made: PendingStep, readout: StepReadout) -> None:
        """Take what the device has said of a step that counts."""
        check_orders(readout.values, made.sums.layout)
        self.totals = totals = totals_of(readout.values)
        sizes = partial(readout.sizes, max(self._pipeline.parts))
        self._guard.judge(totals, made.index + 1, self._suspect, sizes=sizes)
        load = None if self._balance is None else self._balance.take_load(readout.loads)
        made.outcome.tell(self._numbers(totals, load, skipped=False))

    def _looked_at(self, made: PendingStep) -> StepNumbers:
        """The numbers of a step that the host has not read yet."""
        readout = made.read()
        load = None if self._balance is None else self._balance.load_of(readout.loads)
        return self._numbers(totals_of(readout.values), load, skipped=readout.blocked)

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
