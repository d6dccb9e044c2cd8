"""The ranks of a proof: where they start, and the engine that each of them makes of the problem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from plait.comm import World
from plait.engine.build import build, join_world
from plait.engine.engine import Engine
from plait.launcher import launch
from plait.plan import Plan
from plait.verify.problem import Problem


def make_engine(problem: Problem, plan: Plan, world: World) -> Engine:
    """The engine of this rank. Collective; errors as `build`."""
    return build(
        problem.make_model(),
        plan,
        loss=problem.loss,
        optimizer=problem.make_optimizer,
        options=problem.options(plan),
        world=world,
    )


def in_new_world(in_world: Callable[[World, Any], Any], task: Any) -> Any:
    """`in_world(world, task)` on new ranks of `task.plan`, or those that torchrun started: what the
    first returns.
    """
    return launch(
        functools.partial(_rank_main, in_world), task, nproc=Plan.parse(task.plan).world_size
    )[0]


def _rank_main(in_world: Callable[[World, Any], Any], task: Any) -> Any:
    world = join_world(Plan.parse(task.plan), backend=task.problem.backend)
    together = False  # a rank that fails leaves alone: the others may never reach the door
    try:
        report = in_world(world, task)
        together = True
        return report
    finally:
        world.close(together=together)
