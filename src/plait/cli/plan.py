"""`plait plan`: the best plans for a model on a cluster, and why the others lost."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from plait.cli import common, plan_questions
from plait.cli.answer import Answer, Json
from plait.cli.estimate import campaign_lines, device_notes, size
from plait.cli.layout import PlanTable, Prose
from plait.cli.parser import UsageError
from plait.cluster.mixed import MixedCluster
from plait.plan import KeepGathered, gathers_layers, kept_key, kept_text, remat_text
from plait.values import JsonMapping

if TYPE_CHECKING:
    from rich.console import RenderableType

    from plait.plan import Plan
    from plait.predict.cost.records import Estimate
    from plait.predict.planner.choose import Choice

SURE = 0.85
"""Plans in whose order one may be less sure than this are said to be too near to tell apart."""


def _head(data: Json) -> tuple[str, ...]:
    unit = data["plans"][0]["unit"]
    return ("plan", "step", f"{unit}/s", "MFU", "bubble", "memory", f"USD/M {unit}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait plan`."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a TOML file with [model], [data], [train], a Hugging Face config.json, or a known "
        "model such as llama3-8b",
    )
    common.add_cluster(parser)
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="the number of devices, instead of the cluster's",
    )
    parser.add_argument(
        "--objective",
        choices=("time", "cost", "memory"),
        default="time",
        help="what the best plan minimises (default: time)",
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="K", help="how many plans are shown (default: 5)"
    )
    parser.add_argument(
        "--explain",
        nargs="*",
        metavar="PLAN",
        help="say why other plans are slower or do not fit; with PLAN, only for these plans",
    )
    parser.add_argument(
        "--risk",
        type=float,
        metavar="P",
        help="the largest accepted probability of running out of memory, such as 0.05",
    )
    parser.add_argument(
        "--fix",
        default="",
        metavar="TEXT",
        help="parts that the plan must have, such as 'tp8 1f1b'; the rest is searched",
    )
    common.add_framework(parser)
    common.add_campaign(parser)
    plan_questions.add_arguments(parser)
    common.add_overrides(parser, "train.global_batch=64 data.seq_len=4096")


def run(arguments: argparse.Namespace) -> Answer:
    """The plans, best first; the exit code is 1 when none fits.

    Raises:
        UsageError: `--gpus` below 1, before this machine is measured.
    """
    from plait.predict.cost.model.from_config import described_once
    from plait.predict.cost.model.tables import read_config

    if arguments.gpus is not None and arguments.gpus < 1:
        raise UsageError(f"--gpus is {arguments.gpus}; it must be 1 or more")
    with described_once():
        return answer(read_config(arguments.config, arguments.overrides), arguments)


def answer(tables: JsonMapping, arguments: argparse.Namespace) -> Answer:
    """The answer for the tables of a config; of `arguments`, the options beside the config.

    Raises:
        UsageError: fewer plans than one, or options that do not go together.
    """
    from plait.plan import Plan
    from plait.predict.cost.api import check_size, cluster_name, cluster_of, described, kept_in
    from plait.predict.cost.campaign import campaign
    from plait.predict.cost.frameworks import framework_of
    from plait.predict.cost.model.tables import assumed
    from plait.predict.planner.choose import NothingFits, decide
    from plait.predict.planner.pareto import pareto_front

    if arguments.top < 1:
        raise UsageError(f"--top is {arguments.top}; show one plan or more")
    named = [Plan.parse(text).check() for text in arguments.explain or ()]
    described(tables, framework_of(arguments.framework))
    if MixedCluster.is_mixed(arguments.cluster or cluster_name(tables)):
        return mixed_answer(tables, arguments)
    common.measured(arguments.cluster or cluster_name(tables))
    cluster = cluster_of(tables, arguments.cluster)
    if arguments.gpus is not None:
        cluster = cluster.with_num_devices(arguments.gpus)
    for plan in named:
        check_size(plan, cluster)
    costs = common.costs_of(arguments, cluster.name)
    is_budget = plan_questions.is_budget(arguments)
    if arguments.costs is not None and (is_budget or arguments.sweep is not None):
        raise UsageError("--costs is for plans; leave it out of budgets and sweeps")
    if arguments.svg is not None and arguments.sweep is None:
        raise UsageError("--svg draws a sweep: say --sweep devices=8..1024")
    if arguments.sweep is not None:
        return plan_questions.sweep_answer(tables, cluster, arguments)
    budget: Json = {}
    if is_budget:
        offer, found = plan_questions.budget_offer(tables, cluster, arguments)
        if offer is None:
            return Answer(
                {"plans": [], "budget": found, "reason": found["reason"]}, found["reason"], ok=False
            )
        cluster = cluster.with_num_devices(offer.num_devices)
        budget = {"budget": found}
    try:
        choice = decide(
            tables,
            cluster,
            objective=arguments.objective,
            framework=arguments.framework,
            risk=arguments.risk,
            fix=arguments.fix,
        )
    except NothingFits as reason:
        return Answer({"plans": [], "reason": str(reason)}, str(reason), ok=False)
    plans = [
        {**estimate.as_dict(), **campaign(estimate, arguments.tokens, arguments.mtbf, costs)}
        for estimate in different(choice.plans, arguments.top)
    ]
    data: Json = {
        "plans": plans,
        **budget,
        "objective": arguments.objective,
        "framework": framework_of(arguments.framework).name,
        "cluster": cluster.name,
        "num_devices": cluster.num_devices,
        "pareto": [str(estimate.plan) for estimate in pareto_front(choice.plans)],
        "searched": {
            "combinations": choice.found.num_degrees,
            "plans": choice.found.num_guesses,
            "too_large": len(choice.found.too_large),
            "not_opened": choice.found.not_opened,
        },
    }
    notes = blocks_notes(choice.plans)
    notes += kept_notes(choice, kept_in(tables))
    notes += device_notes(choice.plans[0].plan, cluster)
    notes += near_notes(plans) if arguments.objective == "time" else []
    notes += assumed(tables, choice.job.global_batch, choice.job.model.seq_len)
    data["notes"] = [*notes, *_shares_notes(choice)]
    if arguments.explain is not None:
        data["explanation"] = _explanation(choice, named)
    return Answer(data, partial(_view, data))


def _shares_notes(choice: Choice) -> list[str]:
    shares = choice.job.shares
    if not shares:
        return []
    return [
        f"plan.shares {list(shares)} is for dp{len(shares)}, which is predicted with the largest "
        "share; other plans have equal ones"
    ]


def blocks_notes(plans: list[Estimate]) -> list[str]:
    """The recomputation of each block where the first plan has `remat:auto`, and what it gains."""
    first = plans[0]
    if first.plan.remat != "auto":
        return []
    others = [one.step_seconds for one in plans if one.plan.remat != "auto"]
    less = 1 - first.step_seconds / min(others)
    return [
        f"the first recomputes block by block: {remat_text(first.remat)}; it is predicted "
        f"{less:.1%} faster than with one word for all, and fits with probability "
        f"{first.fits_probability:.0%}"
    ]


def kept_notes(choice: Choice, keep: KeepGathered) -> list[str]:
    """The blocks that the first plan keeps gathered, as the key of a config, and what they gain.

    A choice that gains too little to be the planner's own is said where `auto` asks for it.
    """
    from plait.predict.cost.step import estimate_job

    first = choice.plans[0]
    whole = first
    if not first.keep_gathered:
        if keep != "auto" or not gathers_layers(first.plan):
            return []
        whole = estimate_job(replace(choice.job, kept="auto"), first.plan, choice.machine)
        if not whole.keep_gathered:
            return ['keep_gathered = "auto" keeps no block of the first plan']
    kept = whole.keep_gathered or ()
    plain = estimate_job(choice.job, first.plan, choice.machine)
    number = kept_key(kept, choice.job.model.num_repeated)
    keeps = "keeps" if whole is first else "would keep"
    return [
        f"the first {keeps} {kept_text(kept)} gathered, [plan] keep_gathered = {number}: it is "
        f"predicted with {whole.step_seconds:.4g} s a step instead of {plain.step_seconds:.4g} s, "
        f"and fits with probability {whole.fits_probability:.0%}"
    ]


def near_notes(plans: list[Json]) -> list[str]:
    """The plans that predictions cannot tell from the first, of plans in the order of time."""
    from plait.predict.cost.bars import order_probability

    ratios = [one["step_seconds"] / plans[0]["step_seconds"] for one in plans[1:]]
    near = [ratio for ratio in ratios if order_probability(ratio) < SURE]
    if not near:
        return []
    sure = order_probability(max(near))
    are = "the next plan is" if len(near) == 1 else f"the next {len(near)} plans are"
    return [
        f"{are} within {max(near) - 1:.1%} of the first, too near to tell apart: {sure:.0%} of "
        "published pairs as near were in the predicted order; measure them"
    ]


def mixed_answer(tables: JsonMapping, arguments: argparse.Namespace) -> Answer:
    """The plans of two kinds of device. Errors: `UsageError` for an option of one kind."""
    from plait.predict.cost.api import cluster_name, job_of
    from plait.predict.cost.campaign import campaign
    from plait.predict.cost.frameworks import framework_of
    from plait.predict.cost.model.tables import assumed
    from plait.predict.planner.choose import NothingFits
    from plait.predict.planner.mixed import check_objective, choose_mixed

    given = {
        "--gpus": arguments.gpus is not None,
        "--explain": arguments.explain is not None,
        "--risk": arguments.risk is not None,
        "--fix": bool(arguments.fix),
        "--sweep": arguments.sweep is not None,
        "--days or --dollars": plan_questions.is_budget(arguments),
    }
    for option in (option for option, is_given in given.items() if is_given):
        raise UsageError(f"{option} is of one kind of device; leave it out")
    check_objective(arguments.objective)
    name = arguments.cluster or cluster_name(tables)
    try:
        found = choose_mixed(tables, name, framework=arguments.framework, top=100)
    except NothingFits as reason:
        return Answer({"plans": [], "reason": str(reason)}, str(reason), ok=False)
    plans = [
        {
            **one.as_dict(),
            **campaign(one, arguments.tokens, arguments.mtbf, common.costs_of(arguments)),
            "num_devices": one.num_devices,
        }
        for one in different(found, arguments.top)
    ]
    job = job_of(
        tables,
        None,
        framework_of(arguments.framework),
        num_devices=MixedCluster.parse(name).num_devices,
    )
    data: Json = {
        "plans": plans,
        "framework": arguments.framework,
        "cluster": name,
        "notes": [*assumed(tables, job.global_batch, job.model.seq_len), *part_notes(plans)],
    }
    return Answer(data, partial(_mixed_view, data))


def part_notes(plans: list[Json]) -> list[str]:
    """The plans of a mixed cluster that run on one of its kinds alone."""
    return [
        f"{one['plan']} is run on {one['part']} alone, and the other devices are idle"
        for one in plans
        if "part" in one
    ]


def _mixed_view(data: Json) -> RenderableType:
    from rich.console import Group

    rows = tuple((*_cells(one), one.get("part", "all")) for one in data["plans"])
    best = data["plans"][0]
    keys = [f"{key} = {best[key]}" for key in ("shares", "counts") if key in best]
    runs = f"with [plan] {' and '.join(keys)}" if keys else "with equal parts"
    below = [
        "",
        *campaign_lines(best),
        f"predicted for {data['cluster']}; the first is run on {best['num_devices']} devices, "
        f"{runs}",
        *(f"note: {note}" for note in data["notes"]),
    ]
    return Group(PlanTable((*_head(data), "on"), rows), Prose("\n".join(below)))


TWINS = 0.01
"""Plans of equal degrees that are nearer in time than this are near-twins."""


def different(plans: list[Estimate], top: int) -> list[Estimate]:
    """The first plans, near-twins of better ones only where no others are left."""
    chosen: list[Estimate] = []
    twins: list[Estimate] = []
    for one in plans:
        alike = any(_degrees(one) == _degrees(other) and _near(one, other) for other in chosen)
        (twins if alike else chosen).append(one)
        if len(chosen) == top:
            break
    kept = {id(one) for one in [*chosen, *twins][:top]}
    return [one for one in plans if id(one) in kept]


def _degrees(one: Estimate) -> tuple[int, ...]:
    plan = one.plan
    return plan.tp.size, plan.pp.size, plan.cp.size, plan.ep, plan.dp.size


def _near(one: Estimate, other: Estimate) -> bool:
    return abs(one.step_seconds / other.step_seconds - 1) < TWINS


def _explanation(choice: Choice, named: list[Plan]) -> list[str]:
    from plait.predict.planner.explain import explain, explain_plan

    if not named:
        return explain(choice)
    return [explain_plan(choice, plan) for plan in named]


def _view(data: Json) -> RenderableType:
    from rich.console import Group

    table = PlanTable(_head(data), tuple(_cells(one) for one in data["plans"]))
    searched = data["searched"]
    below = [
        "",
        *campaign_lines(data["plans"][0]),
        *(plan_questions.budget_lines(data["budget"]) if "budget" in data else ()),
        f"predicted for {data['cluster']}; plans looked at: {searched['plans']}; ways to split "
        f"{data['num_devices']} devices: {searched['combinations']}, of which do not fit: "
        f"{searched['too_large']}",
        *data.get("explanation", []),
        *(f"note: {note}" for note in data["notes"]),
    ]
    return Group(table, Prose("\n".join(below)))


def _cells(one: Json) -> tuple[str, ...]:
    return (
        one["plan"],
        f"{one['step_seconds']:.4g} s",
        f"{one['tokens_per_second']:,.0f}",
        f"{one['mfu']:.1%}",
        f"{one['bubble_fraction']:.1%}",
        size(one["memory"]["total"]),
        f"{one['cost_per_million_tokens']:.3g}",
    )
