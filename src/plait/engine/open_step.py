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
        self._calls = 0
        self._is_summed = False

    @classmethod
    def of(cls, engine: Engine) -> OpenStep:
        """The step of an engine. Errors: `PlanError` where nothing comes between gradient and
        update.
        """
        open_plan(engine.plan)
        return cls(engine.training_step)

    def forward_backward(self, batch: PyTree, *, more: bool = False) -> MetricSum:
        """Add the gradients of this rank's share of a batch; the loss of all ranks' shares.

        `more` says that another call adds to them before the update.

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
        step, actions = training_step.begin(batch, self._calls)
        wanted = [action for action in actions if self._belongs(action, more=more)]
        with torch.enable_grad():
            training_step.execute(wanted, self._timeline, step)
        measured = training_step.over_ranks([training_step.loss])[0]
        if self._calls:
            training_step.loss.join(earlier)
        self._calls += 1
        self._is_summed = not more
        if self._is_summed:
            training_step.update.sum_gradients()
        return measured

    def _belongs(self, action: Action, *, more: bool) -> bool:
        """Whether an action of a step is one of this call."""
        if action.kind is Kind.UNSHARD:
            return self._calls == 0
        if action.kind is Kind.REDUCE:
            return not more
        return action.kind is not Kind.UPDATE

    @property
    def is_summed(self) -> bool:
        """Whether the gradients of all ranks are summed, and wait for the update."""
        return self._is_summed

    @property
    def norm(self) -> float:
        """The global norm of the gradient of the mean loss; 0 before it is known."""
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
        self._step.update.decide(self._step.index, factor)
        skipped = self._step.finish()
        self.drop()
        return not skipped

    def drop(self) -> None:
        """Forget the gradients; the next forward begins a step."""
        self._calls = 0
        self._is_summed = False
