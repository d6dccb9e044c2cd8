"""The ranks of a proof: where they start, and the engine that each of them makes of the problem.

They compute on processors, as the one device does that they are compared with. GPUs sum in other
orders, and many are slow in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

from plait.comm import World
from plait.engine.build import build, join_world
from plait.engine.engine import Engine
from plait.errors import PlaitError, RunError
from plait.launcher import launch
from plait.plan import Plan
from plait.verify.problem import Problem
from plait.verify.waiting import of_first

T = TypeVar("T")


class RankTask(Protocol):
    """The work of all ranks of a proof: a problem, under a plan."""

    @property
    def plan(self) -> str:
        """The plan's text."""

    @property
    def problem(self) -> Problem:
        """The problem, which every rank makes for itself."""


AnyTask = TypeVar("AnyTask", bound=RankTask)


def make_engine(problem: Problem, plan: Plan, world: World) -> Engine:
    """The engine of this rank. Collective; errors as `build`."""
    engine = build(
        problem.make_model(),
        plan,
        loss=problem.loss_under(plan),
        optimizer=problem.make_optimizer,
        options=problem.options(plan),
        world=world,
    )
    if world.is_simulated:  # threads share random numbers: none steps while others draw weights
        world.axis("world").barrier()
    return engine


def by_first(world: World, judge: Callable[[], T]) -> T:
    """The first rank's result of `judge()`, on every rank. Collective.

    A failure of `judge` is raised on every rank: the same error where it is one of plait's, else a
    `RunError`.
    """
    failures: list[Exception] = []

    def outcome() -> tuple[T | None, tuple[type[PlaitError], str] | None]:
        try:
            return judge(), None
        except PlaitError as error:
            failures.append(error)
            return None, (type(error), str(error))
        except Exception as error:  # of the user's code, run on one device
            failures.append(error)
            return None, (RunError, f"one device fails: {type(error).__name__}: {error}")

    result, refusal = of_first(world, outcome)
    if failures:
        raise failures[0]
    if refusal is not None:
        kind, words = refusal
        raise kind(words)
    assert result is not None
    return result


def in_new_world(in_world: Callable[[World, AnyTask], T], task: AnyTask) -> T:
    """`in_world(world, task)` on new ranks of `task.plan`, or those that torchrun started: what the
    first returns.
    """
    return launch(
        functools.partial(_rank_main, in_world), task, nproc=Plan.parse(task.plan).world_size
    )[0]


def _rank_main(in_world: Callable[[World, AnyTask], T], task: AnyTask) -> T:
    world = join_world(Plan.parse(task.plan), backend=task.problem.backend, device="cpu")
    together = False  # a rank that fails leaves alone: the others may never reach the door
    try:
        report = in_world(world, task)
        together = True
        return report
    finally:
        world.close(together=together)
