"""A step whose parts an outside loop asks for: forwards with backwards, the norm, the update.

`Engine.step` does all of them in one call. Loops of other libraries call the model, scale and clip
the gradient, and ask an optimizer to step. So the actions of a schedule are executed without the
update, which waits until the loop wants it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.engine.engine import Engine
from plait.engine.loss import MetricSum
from plait.engine.training_step import TrainingStep
from plait.errors import ModelError, PlanError
from plait.parallel.pipeline.actions import Action, Kind
from plait.plan import Plan
from plait.plan.facts import SCHEDULES, STRATEGIES
from plait.trace import Timeline
from plait.values import PyTree


def open_plan(plan: str | Plan) -> Plan:
    """The plan that a loop of another library is given, or its text, checked.

    Raises `PlanError` where the plan is wrong, and where its step has no moment between gradient
    and update.
    """
    plan = (Plan.parse(plan) if isinstance(plan, str) else plan).check()
    refused = ""
    if not STRATEGIES[plan.dp.strategy].synchronous:
        refused = f"dp with '{plan.dp.strategy}'"
    elif SCHEDULES[plan.pp.schedule].asynchronous:
        refused = f"pp with '{plan.pp.schedule}'"
    if refused:
        raise PlanError(
            f"plan '{plan}': {refused} updates inside its step, and this loop clips and steps by "
            "itself after a whole gradient; choose another for this axis, or train with plait.fit"
        )
    return plan


class OpenStep:
    """The step of an engine, part by part. Every method is collective."""

    def __init__(self, step_of: Callable[[PyTree], TrainingStep]) -> None:
        """`step_of` gives the training step that a batch belongs to: of one engine, always one."""
        self._step_of = step_of
        self._step: TrainingStep | None = None
        self._timeline = Timeline(enabled=False)
        self._count = 0.0
        self._weights: list[float] = []
        self._is_summed = False

    @classmethod
    def of(cls, engine: Engine) -> OpenStep:
        """The step of an engine. Errors: `PlanError` where nothing comes between gradient and
        update.
        """
        open_plan(engine.plan)
        return cls(engine.checked_step)

    def forward_backward(
        self, batch: PyTree, *, more: bool = False, by_counts: bool = False
    ) -> MetricSum:
        """Add the gradients of this rank's share of a batch; the loss of all ranks' shares.

        `more` says that another call adds to them before the update. Each call adds the gradient
        of its mean loss. With `by_counts` it has the weight of what its loss counts.

        Raises:
            ModelError: the gradients are summed over the ranks already.
        """
        if self._is_summed:
            raise ModelError(
                "a backward came after one whose gradients are summed over the ranks already; say "
                "that gradients accumulate (accelerator.accumulate(model), "
                "fabric.no_backward_sync(model)), or call optimizer.step() between them"
            )
        self._step = training_step = self._step_of(batch)
        earlier = training_step.loss.copy()
        call = len(self._weights)
        step, actions = training_step.begin(batch, call, counts=not (call and by_counts))
        wanted = [action for action in actions if self._belongs(action, more=more)]
        with torch.enable_grad():
            training_step.execute(wanted, self._timeline, step)
        loss = training_step.loss
        measured = training_step.over_ranks([loss])[0]
        self._weights.append(measured.count / float(loss.divisor))
        self._count += measured.count
        if call:
            loss.join(earlier)
            if weight := sum(self._weights):
                loss.share_divisor(self._count / weight)
        self._is_summed = not more
        if self._is_summed:
            training_step.update.sum_gradients()
        return measured

    def _belongs(self, action: Action, *, more: bool) -> bool:
        """Whether an action of a step is one of this call."""
        if action.kind is Kind.UNSHARD:
            return not self._weights
        if action.kind is Kind.REDUCE:
            return not more
        return action.kind is not Kind.UPDATE

    @property
    def weights(self) -> list[float]:
        """The weights by which the calls since the last update have added the gradients of their
        mean losses.
        """
        return list(self._weights)

    @property
    def is_summed(self) -> bool:
        """Whether the gradients of all ranks are summed, and wait for the update."""
        return self._is_summed

    @property
    def norm(self) -> float:
        """The global norm of the mean of the calls' gradients, by their weights; 0 before it is
        known.
        """
        if self._step is None or not self._is_summed:
            return 0.0
        return self._step.update.grad_norm()

    def update(self, factor: float = 1.0) -> bool:
        """One update by the gradient times `factor`; whether it was made.

        Raises:
            ModelError: gradients still accumulate.
        """
        if self._step is None or not self._is_summed:
            raise ModelError(
                "optimizer.step() came before the last backward of its step: gradients still "
                "accumulate"
            )
        self._step.decide(factor)
        skipped = self._step.finish()
        self.drop()
        return not skipped

    def drop(self) -> None:
        """Forget the gradients; the next forward begins a step."""
        self._count = 0.0
        self._weights = []
        self._is_summed = False
