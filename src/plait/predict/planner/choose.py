"""The best plans for a config on a cluster of one kind, best first, or what it would take."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.cluster import Cluster
from plait.errors import ConfigError, PlanError, nearest
from plait.plan import Plan
from plait.predict.cost import bars
from plait.predict.cost.api import cluster_of, job_of
from plait.predict.cost.bars import reach
from plait.predict.cost.frameworks import PLAIT, Framework, framework_of
from plait.predict.cost.machines import kept_machine
from plait.predict.cost.model.tables import config_tables
from plait.predict.cost.records import Estimate, Job
from plait.predict.cost.rough import Guess
from plait.predict.cost.time.machine import Machine
from plait.predict.planner.blocks import BlockSearch
from plait.predict.planner.fixed import Fixed
from plait.predict.planner.kept import KeptSearch
from plait.predict.planner.refine import LocalSearch
from plait.predict.planner.search import OBJECTIVES, Found, SearchSettings, fits_somehow, search
from plait.predict.planner.words import times
from plait.values import JsonMapping

LARGEST_CLUSTER = 1 << 20
BLOCKS_RISK = 0.05
"""Blocks are chosen one by one (`remat:auto`) until the memory is full. So they have the memory
that this risk leaves, or that of the first plan without them. The larger counts.
"""
USUAL_RISK = 0.5
"""Largest probability of running out of memory on an accelerator where none is named. A plan above
it is only chosen where no other fits.
"""


class NothingFits(PlanError):
    """No plan fits the memory of the cluster. The message says how far off it is and from how many
    devices on it fits.
    """

    exit_code = 1


@dataclass(frozen=True)
class Choice:
    """The answer of a search: its plans, best first, and the numbers of those that it looked at."""

    plans: list[Estimate]
    found: Found
    job: Job
    machine: Machine


def check_top(top: int) -> None:
    """Raises `ConfigError` for a list of no plans, and for what is no whole number."""
    if isinstance(top, bool) or not isinstance(top, numbers.Integral):
        raise ConfigError(f"top is a whole number, as 10, not {top!r}")
    if top < 1:
        raise ConfigError(f"top = {top}: a list has one plan or more")


def check_risk(risk: float | None) -> None:
    """Raises `ConfigError` for a risk that is no probability between 0 and 1."""
    if risk is None:
        return
    if isinstance(risk, bool) or not isinstance(risk, numbers.Real):
        raise ConfigError(f"risk is a probability, as 0.05, not {risk!r}")
    if not 0 < risk < 1:
        raise ConfigError(f"risk = {risk:g}: a probability lies between 0 and 1, as 0.05")


def decide(
    config: JsonMapping | str | Path,
    cluster: Cluster | str | None = None,
    *,
    objective: str = "time",
    runnable: bool = False,
    framework: Framework | str = "plait",
    risk: float | None = None,
    fix: str = "",
) -> Choice:
    """The plans of `plait.choose` for one kind of device, with what the search saw.

    Raises:
        NothingFits: no plan fits.
        ConfigError: a risk that is no probability, or an unknown objective.
    """
    check_risk(risk)
    if objective not in OBJECTIVES:
        word = str(objective)
        raise ConfigError(f"objective {objective!r} is unknown; {nearest(word, OBJECTIVES)}")
    tables = config_tables(config)
    runs = framework_of(framework)
    machines = cluster_of(tables, cluster)
    machine = kept_machine(machines)
    job = job_of(tables, None, runs, num_devices=machines.num_devices)
    fixed = Fixed.parse(fix)
    _check_experts(fixed, job)
    settings = settings_for(tables, machine, objective)
    settings = replace(
        settings,
        runnable=runnable,
        framework=runs,
        fixed=fixed,
        precision=fixed.value("", "precision") or settings.precision,
        compile=fixed.value("", "compile") or settings.compile,
    )
    machines.device.peak_flops(settings.precision)
    place = reach(machines.num_devices, machine.devices_per_node)
    usual = 1.0 if machines.device.is_cpu else bars.share_for(USUAL_RISK, place)
    shares = [usual, 1.0] if risk is None else [bars.share_for(risk, place)]
    for share in dict.fromkeys(shares):
        sure = kept_machine(machines, share)
        searches = _searched(job, sure, machines.num_devices, settings)
        plans = [estimate for one in searches for estimate in one.best]
        if plans:
            plans = [replace(one, memory_limit=one.memory_limit / share) for one in plans]
            plans.sort(key=_order(objective))
            choice = Choice(plans, searches[0], job, sure)
            guesses = [guess for one in searches for guess in one.of_degrees.values()]
            choice.plans[:0] = _by_blocks(choice, machines, settings, guesses)
            kept = _keeping(choice, machines, settings, guesses)
            # One that keeps blocks stands for the same plan without.
            others = [one for one in choice.plans if all(one.plan != best.plan for best in kept)]
            return replace(choice, plans=kept + others)
    raise NothingFits(_why_nothing_fits(job, sure, machines, settings, searches[0]))


def _check_experts(fixed: Fixed, job: Job) -> None:
    """Raises `PlanError` for experts that are decided for a model without them."""
    ep = fixed.value("", "ep") or 1
    if ep > 1 and not job.model.num_experts:
        raise PlanError(f"fix '{fixed.text}': {job.model.name} has no experts; leave ep{ep} out")


def _searched(
    job: Job, machine: Machine, num_devices: int, settings: SearchSettings
) -> list[Found]:
    """The searches over all devices, or over fewer where that is cheaper or all that there is."""
    sizes = [num_devices]
    if settings.objective == "cost":
        sizes = [num_devices >> shift for shift in range(12) if num_devices >> shift]
    found = [search(job, machine, size, settings) for size in sizes]
    for one in found:
        one.best = LocalSearch(job, machine, settings).from_plans(one.best)
    if not any(one.best for one in found):
        found += _fewer(job, machine, num_devices, settings)
    return found


def _by_blocks(
    choice: Choice, machines: Cluster, settings: SearchSettings, guesses: Sequence[Guess]
) -> list[Estimate]:
    """The plan with `remat:auto` that is faster than all others, if there is one."""
    if settings.framework is not PLAIT or settings.objective == "memory":
        return []
    roomy = _roomy(choice, machines)
    plans, guesses = _of_one_size(choice.plans, guesses)
    found = BlockSearch(choice.job, roomy, settings, plans, guesses).faster()
    return _of_whole_memory(found, roomy)


def _keeping(
    choice: Choice, machines: Cluster, settings: SearchSettings, guesses: Sequence[Guess]
) -> list[Estimate]:
    """The plan with blocks that zero3 keeps whole that is faster than all others, if there is one.
    None where the config says which blocks.
    """
    is_asked = choice.job.kept is None and settings.framework is PLAIT
    if not is_asked or settings.objective == "memory":
        return []
    roomy = _roomy(choice, machines)
    plans, guesses = _of_one_size(choice.plans, guesses)
    return _of_whole_memory(KeptSearch(choice.job, roomy, plans, guesses).faster(), roomy)


def _of_one_size(
    plans: Sequence[Estimate], guesses: Sequence[Guess]
) -> tuple[list[Estimate], list[Guess]]:
    """Plans with as many ranks as the first; of them the fastest is the cheapest too."""
    size = plans[0].plan.world_size
    return (
        [one for one in plans if one.plan.world_size == size],
        [one for one in guesses if one.plan.world_size == size],
    )


def _roomy(choice: Choice, machines: Cluster) -> Machine:
    """The machine with the memory that choices for each block may fill: see `BLOCKS_RISK`."""
    share = choice.machine.memory.share
    if not machines.device.is_cpu:
        first = choice.plans[0]
        place = reach(machines.num_devices, choice.machine.devices_per_node)
        filled = first.memory.total / first.memory_limit
        share = min(share, max(filled, bars.share_for(BLOCKS_RISK, place)))
    return choice.machine if share == choice.machine.memory.share else kept_machine(machines, share)


def _of_whole_memory(found: Estimate | None, roomy: Machine) -> list[Estimate]:
    """The plan beside the whole memory, of which a part was left free for errors."""
    if found is None:
        return []
    return [replace(found, memory_limit=found.memory_limit / roomy.memory.share)]


def _order(objective: str) -> Any:
    """Key by which plans are sorted; of equal ones the shorter text comes first."""

    def key(estimate: Estimate) -> tuple[float, float, int]:
        seconds = float(f"{estimate.step_seconds:.9g}")
        first = {"cost": estimate.cost_per_million_tokens, "memory": estimate.memory.total}.get(
            objective, seconds
        )
        return float(f"{first:.9g}"), seconds, len(str(estimate.plan))

    return key


def settings_for(tables: JsonMapping, machine: Machine, objective: str) -> SearchSettings:
    """Settings from the config's plan text: precision and compiling; else bf16 on accelerators and
    float32 on processors.
    """
    text = str(tables.get("plan", {}).get("text") or "")
    if text.strip() != "auto":
        Plan.parse(text)
    words = text.split()
    precision = next(
        (word.partition(":")[2] for word in words if word.startswith("precision:")), ""
    )
    return SearchSettings(
        precision or machine.default_precision,
        "compile" in words,
        objective,
        offloads_activations=bool(tables.get("plan", {}).get("offload_activations")),
    )


def _fewer(job: Job, machine: Machine, num_devices: int, settings: SearchSettings) -> list[Found]:
    """Searches over fewer devices, where a model or batch does not divide by all of them."""
    for size in range(num_devices - 1, max(0, num_devices - 9), -1):
        found = search(job, machine, size, settings)
        if found.best:
            return [found]
    return []


def _why_nothing_fits(
    job: Job, machine: Machine, machines: Cluster, settings: SearchSettings, found: Found
) -> str:
    name = machines.device.name
    model = job.model
    sizes = settings.fixed.least_sizes()
    least = math.prod(sizes.values())
    if least > machines.num_devices:
        axes = " x ".join(f"{axis}{size}" for axis, size in sizes.items())
        return (
            f"fix '{settings.fixed.text}' takes {axes} = {least} devices or more, and "
            f"{machines.name} has {machines.num_devices}; "
            f"{machines.how_to_have(least)}, or fix less"
        )
    runs = "" if settings.framework is PLAIT else f" of {settings.framework.name}"
    runs += f" with {settings.fixed.text}" if settings.fixed.text else ""
    if not found.too_large:
        return (
            f"no plan{runs} divides {model.name} ({model.parameters / 1e9:.3g} B parameters, "
            f"{model.num_repeated} layers) "
            f"and a global batch of {job.global_batch} over {machines.num_devices} devices; "
            "try another number of devices or a larger global batch"
        )
    over = min(found.too_large.values())
    base = (
        f"no plan{runs} fits {model.name} ({model.parameters / 1e9:.3g} B parameters) on "
        f"{machines.name}: "
        f"the nearest needs {times(over)} times the memory of {name}"
    )
    size, batch = _from_where(job, machine, machines.num_devices, settings)
    if not size:
        return (
            f"{base}; no number of devices up to {LARGEST_CLUSTER} fits it, choose devices with "
            "more memory"
        )
    samples = f" and {batch} samples a step" if batch != job.global_batch else ""
    return f"{base}; fits from {size} devices{samples}"


def _from_where(
    job: Job, machine: Machine, num_devices: int, settings: SearchSettings
) -> tuple[int, int]:
    """The fewest devices tried with which the model fits, and the samples a step; zeros if none."""
    size = num_devices
    while size < LARGEST_CLUSTER:
        size *= 2
        batches = sorted({job.global_batch, max(job.global_batch, size)})
        for batch in batches:
            if _fits(job, machine, size, settings, batch):
                between = range(size // 2 + num_devices, size, max(num_devices, size // 16))
                fewer = next(
                    (one for one in between if _fits(job, machine, one, settings, batch)), size
                )
                return fewer, batch
    return 0, 0


def _fits(job: Job, machine: Machine, size: int, settings: SearchSettings, batch: int) -> bool:
    return fits_somehow(replace(job, global_batch=batch), machine, size, settings)
