"""The timeline of a predicted step: its schedule walked with the costs of the cost model."""

from __future__ import annotations

from plait.errors import PlanError
from plait.parallel.pipeline.actions import Kind, Schedule
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.observed import Messages, simulated_step
from plait.parallel.pipeline.schedules import make
from plait.plan import Plan
from plait.predict.cost.records import Job
from plait.predict.cost.step import pass_costs
from plait.predict.cost.time.machine import Machine
from plait.trace import Timeline

MOST_ACTIONS = 20_000
"""Forwards and backwards of a pipeline that are written down to be drawn."""


def schedule_of(plan: Plan, num_steps: int) -> Schedule:
    """The schedule of a pipeline: one step, or a stretch of an asynchronous stream."""
    pp = plan.pp
    schedule = make(pp.schedule, pp.size, plan.micro_batches, pp.virtual)
    if schedule.asynchronous:
        return make(pp.schedule, pp.size, plan.micro_batches, pp.virtual, num_steps=num_steps)
    return lower(schedule)


def step_timeline(job: Job, plan: Plan, machine: Machine) -> Timeline:
    """The predicted actions of one pipeline; ranks are places on it."""
    stages, tails = pass_costs(job, plan, machine)
    schedule = schedule_of(plan, 1)
    costs: dict[tuple[Kind, int], float] = {}
    for stage, seconds in enumerate(stages):
        costs[Kind.FORWARD, stage] = seconds.forward
        costs[Kind.BACKWARD, stage] = seconds.backward
        costs[Kind.INPUT_GRAD, stage] = seconds.input_grad
        costs[Kind.WEIGHT_GRAD, stage] = seconds.weight_grad
    for rank, tail in enumerate(tails):
        own = schedule.stages(rank)
        costs.update({(Kind.UPDATE, stage): tail / len(own) for stage in own})
    known = {key: seconds for key, seconds in costs.items() if seconds > 0}
    return simulated_step(schedule, known, Messages(max(stage.send for stage in stages)))


def check_drawable(plan: Plan) -> None:
    """Raises `PlanError` for a step of more actions than anybody could look at."""
    actions = 3 * plan.pp.num_stages * plan.micro_batches
    if actions > MOST_ACTIONS:
        raise PlanError(
            f"a step of '{plan}' has about {actions:,} actions, and at most {MOST_ACTIONS:,} are "
            "drawn; take fewer stages or micro-batches, whose timeline looks alike"
        )
