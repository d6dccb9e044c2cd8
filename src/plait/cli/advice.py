"""Advice on the pages of runs: what limits a plan, and which plan to try next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.errors import PlaitError
from plait.plan import Plan
from plait.values import JsonMapping

if TYPE_CHECKING:
    from plait.predict.cost.records import Estimate
    from plait.run.rundata import RunData

WORTH = 0.02
"""A plan that is faster, or smaller, by less is not worth a try."""


def advice_for_run(data: RunData) -> list[str]:
    """Sentences for the page of a run."""
    from plait.predict.cost.model.tables import read_config
    from plait.run.rundir import RunFolder

    sentences = waits(data.summary.get("breakdown"))
    if data.prediction is None:
        return [*sentences, f"No plan is proposed without a prediction: {data.why_no_prediction}"]
    sentences += limits(data.prediction.numbers)
    try:
        return [*sentences, *proposals(read_config(RunFolder(data.folder).config), data.plan)]
    except PlaitError as error:
        return [*sentences, f"No plan is proposed: {error}"]


def waits(breakdown: JsonMapping | None) -> list[str]:
    """The axis on which the ranks of a run waited longest."""
    waiting = (breakdown or {}).get("waiting_seconds") or {}
    whole = (breakdown or {}).get("step_seconds") or 0.0
    longest = max(waiting, key=lambda axis: waiting[axis], default=None)
    if longest is None or not whole or waiting[longest] < WORTH * whole:
        return []
    part = waiting[longest] / whole
    return [f"Measured: the ranks wait for messages of {longest} for {part:.0%} of a step."]


def limits(numbers: JsonMapping) -> list[str]:
    """The causes of most of a predicted step's time and memory."""
    from plait.predict.planner.explain import CAUSES

    spent = {
        name: value / numbers["step_seconds"]
        for name, value in numbers["breakdown_seconds"].items()
    }
    rest = {name: part for name, part in spent.items() if name != "compute"}
    most = max(rest, key=lambda name: rest[name])
    sentence = f"By the prediction, {spent.get('compute', 0.0):.0%} of a step is computing"
    if rest[most] >= WORTH:
        sentence += f"; the next most is {CAUSES.get(most, most)}, {rest[most]:.0%}"
    memory = numbers["memory"]
    kinds = {name: count for name, count in memory.items() if name != "total"}
    fullest = max(kinds, key=lambda name: kinds[name])
    room = memory["total"] / numbers["memory_limit"]
    return [
        f"{sentence}.",
        f"The fullest rank needs {room:.0%} of the memory of its device, most of it for {fullest}.",
    ]


def proposals(tables: JsonMapping, plan: Plan) -> list[str]:
    """Plans of as many ranks that are predicted to be faster, or to need less memory.

    Errors: those of `plait.predict.planner.choose.decide`.
    """
    from plait.predict.cost import estimate
    from plait.predict.cost.api import cluster_of
    from plait.predict.planner.choose import decide

    cluster = cluster_of(tables, None)
    estimated = estimate(tables, plan, cluster)
    if cluster.num_devices != plan.world_size:
        cluster = cluster.with_num_devices(plan.world_size)
    words = [word for word in str(plan).split() if not word.startswith("precision:")]
    text = " ".join([*words, f"precision:{plan.precision}"])
    asked = {**tables, "plan": {**tables.get("plan", {}), "text": text}}
    plans = [one for one in decide(asked, cluster, runnable=True).plans if one.plan != plan]
    sentences = []
    fastest = min(plans, key=lambda one: one.step_seconds, default=None)
    if fastest is not None and fastest.step_seconds < (1 - WORTH) * estimated.step_seconds:
        sentences.append(f"{_faster(fastest, estimated)}, and fit.")
    else:
        ranks = f"{plan.world_size} ranks" if plan.world_size > 1 else "one rank"
        sentences.append(f"No other plan of {ranks} is predicted to be much faster.")
    smallest = min(plans, key=lambda one: one.memory.total, default=None)
    if smallest is not None and smallest.memory.total < (1 - WORTH) * estimated.memory.total:
        less = 1 - smallest.memory.total / estimated.memory.total
        slower = smallest.step_seconds / estimated.step_seconds - 1
        word = "longer" if slower > 0 else "shorter"
        step = f"its step would be {abs(slower):.0%} {word}"
        sentences.append(f"'{smallest.plan}' would need {less:.0%} less memory; {step}.")
    return sentences


def _faster(other: Estimate, own: Estimate) -> str:
    part = 1 - other.step_seconds / own.step_seconds
    times = f"{other.step_seconds * 1e3:.4g} ms instead of {own.step_seconds * 1e3:.4g} ms"
    words = f" with plan.keep_gathered {[*other.keep_gathered]}" if other.keep_gathered else ""
    return f"Try '{other.plan}'{words}: it would be {part:.0%} faster (predicted {times})"
