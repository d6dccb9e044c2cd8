"""Choose for a cluster of two kinds of device: shares of samples, or layers of stages, by speed.

Plans come from the searches of each kind, as if all devices were of it. The slower kind then gets
less: fewer samples in each micro-batch, or fewer layers. Plans of one kind alone compete with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from plait.cluster import Cluster
from plait.cluster.mixed import MixedCluster
from plait.errors import ClusterError, ConfigError, PlanError
from plait.plan import Plan, check_batch, check_config, whole_shares
from plait.plan.axes import REMATS
from plait.predict.cost.api import job_of
from plait.predict.cost.frameworks import Framework, framework_of
from plait.predict.cost.layout import job_sharding
from plait.predict.cost.mixed import check_one_link, estimate_mixed, machines_of
from plait.predict.cost.model.operations import is_layer
from plait.predict.cost.model.tables import config_tables
from plait.predict.cost.ranks import Question, job_pass
from plait.predict.cost.records import Estimate, Job
from plait.predict.cost.sharding import sharding
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.pipeline import live_micro_batches
from plait.predict.cost.time.stages import StageBlocks
from plait.predict.planner.choose import NothingFits, decide, settings_for
from plait.predict.planner.search import SearchSettings, search
from plait.predict.planner.space import divisors
from plait.values import JsonMapping

TRIED: Final = 16
"""Ways to split that are tried, of each kind's search."""
NEAR: Final = 3
"""Shares that are estimated on each side of the balanced ones."""


@dataclass(frozen=True)
class _MixedSearch:
    job: Job
    mixed: MixedCluster
    machines: tuple[Machine, ...]
    settings: SearchSettings


def choose_mixed(
    config: JsonMapping | str | Path,
    cluster: MixedCluster | str,
    *,
    framework: Framework | str = "plait",
    top: int = 10,
) -> list[Estimate]:
    """The fastest plans that fit, best first, with `shares` or `counts` for `[plan]`.

    Raises `ClusterError` for more than two kinds, and `NothingFits` when no plan fits.
    """
    mixed = MixedCluster.parse(cluster) if isinstance(cluster, str) else cluster
    if len(mixed.parts) != 2:
        raise ClusterError(
            f"{mixed.name} has {len(mixed.parts)} parts; shares and layers are chosen for two "
            "kinds of device, as h100x8+a100-80gbx8"
        )
    tables = config_tables(config)
    runs = framework_of(framework)
    machines = machines_of(mixed)
    job = replace(job_of(tables, None, runs, num_devices=mixed.num_devices), shares=(), counts=())
    check_one_link(job, mixed)
    settings = replace(settings_for(tables, machines[0], "time"), framework=runs)
    asked = _MixedSearch(job, mixed, machines, settings)
    found: dict[tuple[object, ...], Estimate] = {}
    for one in _estimates(asked):
        found[one.plan, one.shares, one.counts] = one
    plans = [one for one in found.values() if one.fits]
    # Without a batch in the config each kind alone would be asked about one of its own.
    train = {**tables.get("train", {}), "global_batch": job.global_batch}
    same = {**tables, "train": train}
    plans += [best for part in mixed.parts for best in _alone(same, part, runs)]
    if not plans:
        raise NothingFits(
            f"no plan of {runs.name} fits {job.model.name} on {mixed.name}, nor on one of its "
            "kinds alone; choose devices with more memory, or more of them"
        )
    plans.sort(key=lambda one: (one.step_seconds, str(one.plan)))
    return plans[:top]


def _alone(tables: JsonMapping, part: Cluster, runs: Framework) -> list[Estimate]:
    """The best plan of one kind, the others idle. On two kinds no plan has a choice for each block:
    `remat:auto`, or blocks that stay gathered.
    """
    try:
        plans = decide(tables, part, framework=runs).plans
        plain = [one for one in plans if one.plan.remat != "auto" and not one.keep_gathered][:1]
        return [replace(one, part=part.name) for one in plain]
    except NothingFits:
        return []


def _estimates(asked: _MixedSearch) -> Iterator[Estimate]:
    """Plans of all devices, each with its best shares or layers."""
    total = asked.mixed.num_devices
    seen: set[Plan] = set()
    least = min(asked.machines, key=lambda one: one.memory.total_bytes).memory
    for machine in asked.machines:
        found = search(asked.job, replace(machine, memory=least), total, asked.settings)
        guesses = sorted(found.of_degrees.values(), key=lambda one: one.step_seconds)
        for plan in [*(one.plan for one in found.best), *(one.plan for one in guesses[:TRIED])]:
            for other in _around(plan, asked.job.global_batch):
                if other not in seen:
                    seen.add(other)
                    yield from _fitted(asked, other)


def _around(plan: Plan, batch: int) -> Iterator[Plan]:
    """The plan, and the same with numbers of micro-batches that divide the batch."""
    yield plan
    for count in divisors(batch):
        if plan.micro_batches / 4 <= count <= 4 * plan.micro_batches:
            yield replace(plan, micro_batches=count)


def _fitted(asked: _MixedSearch, plan: Plan) -> Iterator[Estimate]:
    """The plan with the least recomputation that fits."""
    for remat in REMATS[REMATS.index(plan.remat) :]:
        try:
            best = _best(asked, replace(plan, remat=remat))
        except PlanError:
            return
        if best is not None and best.fits:
            yield best
            return


def _best(asked: _MixedSearch, plan: Plan) -> Estimate | None:
    """The plan with its best shares or layers; None where a group would have two kinds."""
    plan.check()
    check_batch(plan, asked.job.global_batch)
    check_config(plan, asked.job.model.sizes)
    groups = plan.pp.size if plan.pp.size > 1 else plan.dp.size
    kinds = asked.mixed.kinds(plan.world_size // groups)
    if kinds is None or groups == 1 or not asked.settings.allows(plan):
        return None
    if plan.pp.size > 1:
        jobs = [replace(asked.job, counts=_layers_by_speed(asked, plan, kinds))]
    else:
        jobs = [replace(asked.job, shares=shares) for shares in _shares(asked, plan, kinds)]
    found = [estimate_mixed(job, plan, asked.mixed, asked.machines) for job in jobs]
    fitting = [one for one in found if one.fits]
    return min(fitting or found, key=lambda one: one.step_seconds, default=None)


def _shares(asked: _MixedSearch, plan: Plan, kinds: Sequence[int]) -> list[tuple[int, ...]]:
    """Shares near the balance of speeds that cut every micro-batch into whole samples."""
    samples, rest = divmod(asked.job.global_batch, plan.micro_batches)
    if rest:
        return []
    first, second = kinds.count(0), kinds.count(1)
    speeds = [1.0 / _sample_seconds(asked.job, plan, machine) for machine in asked.machines]
    wanted = samples * speeds[0] / (first * speeds[0] + second * speeds[1])
    options = []
    for own in range(1, samples // first + 1):
        other, odd = divmod(samples - first * own, second)
        if not odd and other >= 1:
            options.append((abs(own - wanted), own, other))
    chosen = sorted(options)[: 2 * NEAR]
    return [whole_shares((own,) * first + (other,) * second) for _, own, other in chosen]


def _sample_seconds(job: Job, plan: Plan, machine: Machine) -> float:
    """Seconds of one more sample on one data rank of a machine.

    Where more samples take no longer, as in a small model, these are the seconds of one alone.
    """
    alone = _seconds(job, plan, machine, 1.0)
    more = _seconds(job, plan, machine, 2.0) - alone
    return more if more > 0 else alone


def _seconds(job: Job, plan: Plan, machine: Machine, samples: float) -> float:
    shard = sharding(plan, job.model.seq_len, samples, job.runtime)
    stage = StageBlocks(job.model.runs, True, True)
    whole = job_pass(job, stage, machine, shard, job.numerics(plan))
    return whole.compute + sum(
        whole.exposed(job.runtime.overlap_tensor, job.runtime.overlap_expert)
    )


def _layers_by_speed(asked: _MixedSearch, plan: Plan, kinds: Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage, so that the slowest stage takes as little as possible.

    Embedding and head go with the outer stages. Raises `PlanError` for more stages than layers.
    """
    job = asked.job
    stages = plan.pp.num_stages
    layers = [block for block in job.model.blocks() if is_layer(block)]
    if len(layers) < stages or len(layers) != job.model.num_blocks - 2:
        raise PlanError(f"plan '{plan}': {job.model.name} has {len(layers)} layers to divide")
    shard = job_sharding(job, plan)
    _, placement = live_micro_batches(
        plan.pp.schedule, plan.pp.size, plan.micro_batches, plan.pp.virtual
    )
    seconds: list[list[float]] = []
    for machine in asked.machines:
        question = Question(job, plan, machine, shard)
        blocks = [StageBlocks(((block, 1),)) for block in job.model.blocks()]
        seconds.append([one.compute for one in question.passes(blocks)])
    return _divided(seconds, [kinds[rank] for rank in placement[:stages]])


def _divided(seconds: Sequence[Sequence[float]], kinds: Sequence[int]) -> tuple[int, ...]:
    """The counts of layers whose slowest stage is fastest.

    `seconds` of each kind are those of the embedding, the layers and the head.

    >>> _divided([[0.0, 1.0, 1.0, 1.0, 1.0, 0.0], [0.0, 3.0, 3.0, 3.0, 3.0, 0.0]], [0, 1])
    (3, 1)
    """
    layers = len(seconds[0]) - 2
    stages = len(kinds)
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]
    for stage, kind in enumerate(kinds):
        own = seconds[kind]
        beside = (own[0] if stage == 0 else 0.0) + (own[-1] if stage == stages - 1 else 0.0)
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (slowest, counts) in best[-1].items():
            spent = beside
            for end in range(start + 1, layers - (stages - stage - 1) + 1):
                spent += own[end]
                option = (max(slowest, spent), (*counts, end - start))
                if end not in reached or option < reached[end]:
                    reached[end] = option
        best.append(reached)
    return best[-1][layers][1]


def check_objective(objective: str) -> None:
    """Raises `ConfigError` for an objective that is not time."""
    if objective != "time":
        raise ConfigError(
            f"objective {objective!r}: plans of two kinds of device are chosen by time; leave "
            "--objective out"
        )
