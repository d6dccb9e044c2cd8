"""The pipeline of one rank, made from its schedule: actions, transfers, and the time of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from plait.comm import Axis, World
from plait.engine.axes import within_stage
from plait.engine.loss import LossFunction
from plait.engine.options import Options
from plait.engine.stages.contexts import MicroBatchContext
from plait.engine.stages.delayed import COUNT, DelayedUpdates
from plait.engine.stages.pipeline import Pipeline, StageWithStrategy
from plait.engine.stages.timing import ImmediateUpdates, UpdateTiming
from plait.engine.update import Update
from plait.parallel.data import ReplicatedParameters
from plait.parallel.pipeline import schedules
from plait.parallel.pipeline.actions import Schedule
from plait.parallel.pipeline.lower import group_weight_grads, joined_weight_grads, lower
from plait.parallel.pipeline.stream import Stream
from plait.parallel.pipeline.transport import Transport
from plait.parallel.pipeline.versions import WeightVersions
from plait.plan import Plan


def schedule_of(plan: Plan, options: Options) -> Schedule:
    """The plan's schedule, or the user's own.

    Transfers and updates are added, but for an asynchronous schedule, whose stream is cut into
    steps first.
    """
    stages, micro_batches = plan.pp.size, plan.micro_batches
    if options.schedule is not None:
        schedule = schedules.adopt(options.schedule, stages, micro_batches)
    else:
        schedule = schedules.make(plan.pp.schedule, stages, micro_batches, plan.pp.virtual)
    if schedule.asynchronous:
        return schedule
    return lower(group_weight_grads(schedule, options.weight_grad_group))


def make_pipeline(
    parts: Mapping[int, StageWithStrategy],
    schedule: Schedule,
    loss: LossFunction,
    contexts: Sequence[MicroBatchContext],
    world: World,
    *,
    wire: torch.dtype | None = None,
) -> Pipeline:
    """The handlers of this rank's actions. `wire`: the type of messages, where it is narrower."""
    axis = world.axis("pp")
    transport = Transport(
        axis,
        schedule.placement,
        world.device,
        gradient_extras=(COUNT,) if schedule.asynchronous else (),
        wire=wire,
        agree=partial(any_has, within_stage(world)),
    )
    return Pipeline(
        parts,
        schedule.num_stages,
        transport,
        loss,
        contexts=contexts,
        batched=joined_weight_grads(schedule.ranks[axis.rank]),
        random_is_own=not world.is_simulated,
    )


def any_has(ranks: Axis, present: list[bool]) -> list[bool]:
    """Which gradients of a boundary any of the ranks has; `present` is what this one has.
    Collective.
    """
    of_ranks = ranks.gather_objects(present)
    if any(len(one) != len(present) for one in of_ranks):
        return [True] * len(present)
    return list(map(any, zip(*of_ranks, strict=True)))


def make_timing(
    schedule: Schedule,
    pipeline: Pipeline,
    update: Update,
    reductions: Sequence[Callable[[], None]],
    world: World,
) -> UpdateTiming:
    """When this rank updates: at the end of each step, but under an asynchronous schedule."""
    axis = world.axis("pp")
    if not schedule.asynchronous:
        return ImmediateUpdates(schedule.ranks[axis.rank])
    num_micro_batches = schedule.num_micro_batches
    strategy = next(iter(pipeline.parts.values())).strategy
    assert isinstance(
        strategy, ReplicatedParameters
    )  # the plan was checked: it keeps whole weights
    per_update = 1 if schedule.delay is None else num_micro_batches
    return DelayedUpdates(
        pipeline,
        update,
        Stream(schedule.name, axis.size, num_micro_batches, axis.rank),
        WeightVersions(strategy, per_update, schedule.delay),
        reductions=reductions,
        ranks_of_stage=within_stage(world),
        stages=axis,
    )
