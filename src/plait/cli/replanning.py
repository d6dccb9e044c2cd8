"""`[recovery]`: which plans a run may go on under, when ranks are lost for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.cli import common
from plait.errors import PlaitError, PlanError
from plait.launcher import joined_world
from plait.plan import Plan, check_batch, check_kept, check_runnable, check_shares
from plait.plan.facts import SCHEDULES, STRATEGIES
from plait.plan.fit import check_config, check_fixed_order, check_messages
from plait.run.plan_keys import check_plan_keys

if TYPE_CHECKING:
    from plait.config import Config
    from plait.launcher.policy import Policy
    from plait.launcher.seat import LaunchPlan


def check(config: Config, plan: Plan) -> None:
    """Refuse a recovery that could not be. Errors: `PlanError`."""
    recovery = config.recovery
    goes_back = recovery.goes_on or recovery.on_nan == "back"
    if not goes_back and not recovery.steps_between_snapshots:
        return
    if not steps_together(plan):
        raise PlanError(
            f"plan '{plan}': its ranks do not step together on one version of the weights, so "
            "[recovery] restarts, replan, snapshot_every and on_nan 'back' cannot bring them back "
            "to one step; "
            "take a synchronous plan, or train.restarts for 'local' and 'async-server'"
        )
    if recovery.replan == "auto":
        common.measured(config.cluster.name)
    for text in named(config):
        fitting(config, Plan.parse(text), plan)


def planned(config: Config, text: str | None, num_ranks: int | None) -> tuple[Config, Plan]:
    """The config and the plan that is meant, as `common.planned` has them. A world that torchrun
    has begun with another number of ranks gets the plan that `[recovery] replan` has for it.

    So a run goes on when machines are lost, and returns to its own plan when they are back.
    Collective there. Errors: those of `common.planned`.
    """
    world = joined_world()
    words = config.plan.text if text is None else text
    if world is None or config.recovery.replan == "never" or words.strip() == "auto":
        return common.planned(config, text, num_ranks)
    own = Plan.parse(words)
    if own.world_size == world.world_size:
        return common.planned(config, text, num_ranks)
    size = world.world_size
    if config.recovery.replan == "auto":
        found = common.chosen_together(config, lambda: _best(config, own, size) or own)
    else:
        listed = [Plan.parse(one) for one in named(config)]
        found = next((one for one in listed if one.world_size == size), own)
    return common.planned(config, str(found), num_ranks)


def steps_together(plan: Plan) -> bool:
    """Whether all ranks of a plan are at one step, with one version of the weights."""
    stale = SCHEDULES[plan.pp.schedule].asynchronous
    return STRATEGIES[plan.dp.strategy].synchronous and not stale


def named(config: Config) -> tuple[str, ...]:
    """The plans that `[recovery] replan` lists."""
    replan = config.recovery.replan
    return () if isinstance(replan, str) else replan


def fitting(config: Config, plan: Plan, first: Plan) -> Plan:
    """The plan, when a run that began under `first` can go on under it.
    Errors: `PlanError`, and those of `check_plan_keys`.
    """
    plan.check()
    check_runnable(plan)
    check_batch(plan, config.train.global_batch)
    check_shares(plan, config.plan.shares, config.train.global_batch)
    check_config(plan, common.sizes(config))
    common.check_makeable(plan)
    check_kept(plan, config.plan.keep_gathered)
    check_plan_keys(config, plan)
    check_messages(plan, config.train.messages)
    if config.train.fixed_order:
        check_fixed_order(plan)
    if plan.remat == "auto" and plan != first:
        raise PlanError(
            f"recovery.replan '{plan}': remat:auto is chosen before the ranks start, for "
            f"'{first}'; write remat:full or remat:selective"
        )
    if not steps_together(plan) or plan.precision != first.precision:
        raise PlanError(
            f"recovery.replan '{plan}' cannot go on from '{first}': it must be synchronous, and of "
            f"precision:{first.precision}"
        )
    return plan


def policy(config: Config, plan: Plan) -> Policy:
    """The treatment of lost ranks that a config asks for."""
    from plait.launcher.policy import Policy

    recovery = config.recovery

    def choose(num_ranks: int) -> LaunchPlan | None:
        return _launch_plan(config, plan, num_ranks)

    return Policy(
        restarts=recovery.restarts,
        choose=None if recovery.replan == "never" else choose,
        wait_seconds=recovery.wait_seconds,
        deadline_seconds=recovery.deadline_seconds,
        hang_seconds=recovery.hang_seconds,
    )


def _launch_plan(config: Config, first: Plan, num_ranks: int) -> LaunchPlan | None:
    """The plan for so many ranks or fewer, most ranks first; None where there is none."""
    from plait.launcher.seat import LaunchPlan

    if config.recovery.replan != "auto":
        listed = [Plan.parse(text) for text in named(config)]
        chosen = next((plan for plan in listed if plan.world_size <= num_ranks), None)
        return None if chosen is None else LaunchPlan(str(chosen), chosen.world_size)
    for count in range(num_ranks, 0, -1):
        found = _best(config, first, count)
        if found is not None:
            return LaunchPlan(str(found), found.world_size)
    return None


def _best(config: Config, first: Plan, num_ranks: int) -> Plan | None:
    """The planner's best plan for exactly so many ranks, of those that the run can go on under."""
    from dataclasses import replace

    from plait.cluster import Cluster
    from plait.predict import planner

    cluster = replace(Cluster.parse(config.cluster.name), num_devices=num_ranks)
    precision = f"precision:{first.precision}"  # a cluster's own may be another
    try:
        found = planner.choose(
            config.as_dict(), cluster, top=common.ALL, runnable=True, fix=precision
        )
    except PlaitError:  # nothing fits
        return None
    for estimate in found:
        plan = Plan.parse(str(estimate.plan))
        try:
            return fitting(config, plan, first)
        except PlaitError:
            continue
    return None
