"""A step whose parts an outside loop asks for: forwards with backwards, the norm, the update.

`Engine.step` does all of them in one call. Loops of other libraries call the model, scale and clip
the gradient, and ask an optimizer to step. So the actions of a schedule are executed without the
update, which waits until the loop wants it.
"""

from __future__ import annotations

import torch

from plait.doctor.flight import Phase
from plait.engine.engine import Engine
from plait.engine.explain import explained, memory_error, token_error
from plait.engine.loss import LossSum, MetricSum, summed
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

    def __init__(self, engine: Engine) -> None:
        open_plan(engine.plan)
        self._engine = engine
        self._calls = 0
        self._is_summed = False

    def forward_backward(self, batch: PyTree, *, more: bool = False) -> MetricSum:
        """Add the gradients of this rank's share of a batch; the loss of all ranks' shares.

        `more` says that another call adds to them before the update.
        """
        engine = self._engine
        if self._is_summed:
            raise ModelError(
                "a backward came after one whose gradients are summed over the ranks already; say "
                "that gradients accumulate (accelerator.accumulate(model), "
                "fabric.no_backward_sync(model)), or call optimizer.step() between them"
            )
        engine._cut_by(batch)
        engine.model.train()
        if not self._calls:
            engine.guard.begin(engine.model)
            engine._loss_scale = engine._scale.value
            engine.driver.before_step()
        pipeline = engine._pipeline
        earlier = pipeline.loss
        pipeline.loss = LossSum(engine.world.device)
        step, actions = engine._timing.begin(engine._step_of(batch, self._calls), engine.step_index)
        pipeline.begin(step)
        name = f"step {engine.step_index + 1}"
        engine.world.recorder.flight.enter(Phase.STEPPING)
        with (
            torch.enable_grad(),
            explained(
                memory_error(engine.world.rank, name),
                *engine._explainers,
                token_error(engine.model, step.pairs(), name),
            ),
        ):
            wanted = [action for action in actions if self._belongs(action, more=more)]
            engine._execute(wanted, Timeline(engine.world.rank, enabled=False))
        axes = (engine._everyone, engine._stages)
        measured = summed([pipeline.loss], engine.update.loss_copies, axes)[0]
        if self._calls:
            pipeline.loss.join(earlier)
        self._calls += 1
        self._is_summed = not more
        if self._is_summed:
            engine._sum_gradients()
        return measured

    def _belongs(self, action: Action, *, more: bool) -> bool:
        """Whether an action of a step is one of this call."""
        if action.kind is Kind.UNSHARD:
            return self._calls == 0
        if action.kind is Kind.REDUCE:
            return not more
        return action.kind is not Kind.UPDATE

    @property
    def is_cut(self) -> bool:
        """Whether the model is cut into its stages, for which some plans need a batch."""
        return self._engine._uncut is None

    @property
    def is_summed(self) -> bool:
        """Whether the gradients of all ranks are summed, and wait for the update."""
        return self._is_summed

    @property
    def norm(self) -> float:
        """The global norm of the gradient of the mean loss; 0 before it is known."""
        return self._engine._grad_norm() if self._is_summed else 0.0

    def update(self, scale: float = 1.0) -> bool:
        """One update by the gradient times `scale`; whether it was made."""
        engine = self._engine
        if not self._is_summed:
            raise ModelError(
                "optimizer.step() came before the last backward of its step: gradients still "
                "accumulate"
            )
        engine._apply(scale)
        engine.step_index += 1
        engine._scale.adapt()
        engine.world.recorder.flight.step_done(engine.step_index)
        self.drop()
        return not (engine._scale.skipped or engine.guard.skipped)

    def drop(self) -> None:
        """Forget the gradients; the next forward begins a step."""
        self._calls = 0
        self._is_summed = False
