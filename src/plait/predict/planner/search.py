"""Find the best plans: bound every combination of degrees, open the promising ones, replay the
winners' schedules.

A bound that no plan of some degrees can beat orders the search. It has compute without bubbles,
exposed communication inside layers, the largest micro-batch. So the search can stop as soon as the
bounds pass the plans already found.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from plait.errors import PlanError
from plait.plan import DataAxis, PipelineAxis, Plan, is_runnable
from plait.plan.axes import BlockRemat, Remat
from plait.plan.fit import OFFLOADED
from plait.plan.precisions import PRECISION
from plait.predict.cost.frameworks import PLAIT, Framework
from plait.predict.cost.ranks import job_pass
from plait.predict.cost.records import Estimate, Job
from plait.predict.cost.rough import Guess, RoughFamily, RoughPlan
from plait.predict.cost.sharding import sharding
from plait.predict.cost.step import estimate_job
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.stages import split_model
from plait.predict.cost.widths import BYTES
from plait.predict.planner.fixed import NOTHING, Fixed
from plait.predict.planner.space import (
    Degrees,
    data_axes,
    degrees,
    micro_batch_counts,
    schedules,
    suits,
)

OBJECTIVES = ("time", "cost", "memory")
FEWEST_REPLAYED = 4
MOST_WORK = 150_000
"""Long pipelines take long to replay: so many plans at least, and then no more than so much
work.
"""
MARGIN = 1.10
"""Degrees whose bound is this much above the best plan are not opened."""


@dataclass(frozen=True)
class SearchSettings:
    """Options that a search may not change, and how much it looks at."""

    precision: str = "bf16"
    compile: bool = False
    objective: str = "time"
    runnable: bool = False
    """Only plans that this version of plait runs."""
    framework: Framework = PLAIT
    """Only plans that it offers."""
    fixed: Fixed = NOTHING
    """Only plans that are as the user decided."""
    keep: int = 10
    """Plans whose schedules are replayed at the end."""
    most: int = 60
    """Most plans that are replayed, where guesses were too good."""
    offloads_activations: bool = False
    """Only plans whose activations can wait in host memory."""

    @property
    def offloads(self) -> bool:
        """Whether optimizer state may be on the host."""
        return self.framework is PLAIT

    @property
    def allows_all(self) -> bool:
        """Whether every plan that is searched may be chosen."""
        return self.framework is PLAIT and not self.runnable

    def allows(self, plan: Plan) -> bool:
        """Whether the framework that runs the plan has all of its parts."""
        moves = plan.remat in OFFLOADED or not self.offloads_activations
        return moves and self.framework.offers(plan) and (not self.runnable or is_runnable(plan))

    def remats(self) -> list[BlockRemat]:
        """The recomputation that is left, least first."""
        left = self.fixed.remats()
        return [one for one in left if one in OFFLOADED or not self.offloads_activations]

    def allowed_data(self, plan: Plan, axes: Iterable[DataAxis]) -> list[DataAxis]:
        """The data axes that the plan may have."""
        if self.allows_all:
            return list(axes)
        return [axis for axis in axes if self.allows(replace(plan, dp=axis))]


@dataclass
class Found:
    """Findings of a search: the best plans, the best of each combination of degrees, and what did
    not fit.
    """

    best: list[Estimate] = field(default_factory=list)
    of_degrees: dict[Degrees, Guess] = field(default_factory=dict)
    too_large: dict[Degrees, float] = field(default_factory=dict)
    """Memory needed over memory there is, of the smallest plan of these degrees."""
    num_degrees: int = 0
    num_guesses: int = 0
    not_opened: int = 0
    least: float = float("inf")
    """The best score so far."""


def score(guess: Guess, objective: str) -> float:
    """The number that is minimised: seconds (money goes with them, the devices being the same), or
    bytes.
    """
    return (
        guess.memory_bytes * (1 + 1e-6 * guess.step_seconds)
        if objective == "memory"
        else guess.step_seconds
    )


def search(job: Job, machine: Machine, num_devices: int, settings: SearchSettings) -> Found:
    """The best plans that use exactly `num_devices` devices and fit, best first."""
    candidates = Found()
    guesses = list[Guess]()
    queue = []
    for index, combination in enumerate(allowed(job, machine, num_devices, settings)):
        candidates.num_degrees += 1
        needed = states_floor(job, combination, settings)
        if needed > machine.memory_bytes:
            candidates.too_large[combination] = needed / machine.memory_bytes
        else:
            queue.append((time_floor(job, machine, combination, settings), index, combination))
    heapq.heapify(queue)
    while queue:
        bound, _, combination = heapq.heappop(queue)
        if settings.objective != "memory" and bound > MARGIN * candidates.least:
            candidates.not_opened = 1 + len(queue)
            break
        guesses += open_degrees(job, machine, combination, settings, candidates)
    guesses.sort(key=lambda guess: score(guess, settings.objective))
    replayed = list(_replayed(job, machine, guesses, settings))
    key = "memory" if settings.objective == "memory" else "time"
    candidates.best = sorted(
        (one for one in replayed if one.fits),
        key=lambda one: one.memory.total if key == "memory" else one.step_seconds,
    )
    return candidates


def replay_work(plan: Plan) -> int:
    """Micro-batches on stages that are walked when a plan's schedule is replayed."""
    return min(plan.micro_batches, 3 * plan.pp.size) * plan.pp.num_stages


def _replayed(
    job: Job, machine: Machine, guesses: list[Guess], settings: SearchSettings
) -> Iterator[Estimate]:
    """The full estimates of the best guesses, and of more where a guess was too good. It ends when
    the next one promises less than the best that was replayed.
    """
    best = float("inf")
    count = 0
    work = 0
    for guess in guesses[: settings.most]:
        enough = count >= settings.keep or (count >= FEWEST_REPLAYED and work > MOST_WORK)
        if enough and score(guess, settings.objective) > best:
            return
        work += replay_work(guess.plan)
        estimate = estimate_job(job, guess.plan, machine)
        count += estimate.fits
        if estimate.fits:
            reached = Guess(guess.plan, estimate.step_seconds, 0.0, estimate.memory.total)
            best = min(best, score(reached, settings.objective))
        yield estimate


def allowed(
    job: Job, machine: Machine, num_devices: int, settings: SearchSettings
) -> Iterator[Degrees]:
    """The degrees that the framework has."""
    sequence = settings.framework.sequence_parallel
    for combination in degrees(
        job.model,
        num_devices,
        job.global_batch,
        machine.devices_per_node,
        sequence=sequence,
        folds=settings.framework.folds_experts,
        decided=settings.fixed.axes,
    ):
        if not settings.fixed.allows_degrees(combination, job.global_batch):
            continue
        if combination.tp.mode != "1d" and job.messages != "whole":
            continue
        plan = _plan(combination, settings, 1)
        axes = (plan.dp, *(DataAxis(plan.dp.size, name) for name in settings.framework.data))
        if settings.allowed_data(plan, axes):
            yield combination


def fits_somehow(job: Job, machine: Machine, num_devices: int, settings: SearchSettings) -> bool:
    """Whether any plan fits: for each combination of degrees, the smallest that it has, least
    memory for states first.
    """
    combinations = sorted(
        allowed(job, machine, num_devices, settings),
        key=lambda combination: states_floor(job, combination, settings),
    )
    for combination in combinations:
        if states_floor(job, combination, settings) > machine.memory_bytes:
            return False
        plan = _plan(combination, settings, _counts(job, combination, settings)[-1])
        family = RoughFamily(job, plan, machine)
        for data in data_axes(
            combination.dp,
            combination.cp.size,
            settings.framework.data,
            0,
            offloads=settings.offloads,
        ):
            rough = family.member(data, "full")
            room = machine.memory.usable_bytes(rough.asked)
            if rough.kept_bytes <= room and rough.memory_bytes <= room:
                return True
    return False


def _counts(job: Job, combination: Degrees, settings: SearchSettings) -> list[int]:
    batch = job.global_batch
    counts = micro_batch_counts(batch, combination.dp, combination.pp, job.model.seq_len)
    return settings.fixed.counts(counts)


def time_floor(
    job: Job, machine: Machine, combination: Degrees, settings: SearchSettings, count: int = 0
) -> float:
    """Seconds that no plan of these degrees (and of `count` micro-batches) is below."""
    fewest = count or _counts(job, combination, settings)[0]
    plan = _plan(combination, settings, fewest)
    samples = -(-job.global_batch // (combination.dp * fewest))
    shard = sharding(plan, job.model.seq_len, float(samples))
    fused = job.numerics(plan)[1]
    stage = split_model(job.model, 1)[0]
    whole = job_pass(job, stage, machine, shard, (settings.precision, fused, "none"))
    exposed = sum(whole.exposed(job.runtime.overlap_tensor, job.runtime.overlap_expert))
    return fewest * (whole.compute + exposed) / combination.pp


def states_floor(job: Job, combination: Degrees, settings: SearchSettings) -> float:
    """Bytes of weights, gradients and (where it cannot be offloaded) optimizer state when all are
    sharded as far as possible. Of a frozen model adapters alone have gradients and state.
    """
    of_weight = float(BYTES[settings.precision])
    of_trained = of_weight
    if not settings.offloads:
        of_trained += 8 + (4 if PRECISION[settings.precision].has_masters else 0)
    width = of_weight + of_trained
    if job.adapters.trained:
        width = of_weight * job.adapters.kept_share(settings.precision)
        width += (of_weight + of_trained) * job.adapters.trained
    tp = combination.tp
    split = tp.size // tp.depth if tp.mode == "2.5d" else tp.size
    return (
        job.model.parameters
        * width
        / (split * combination.pp * combination.dp * combination.cp.size)
    )


def open_degrees(
    job: Job, machine: Machine, combination: Degrees, settings: SearchSettings, found: Found
) -> Iterator[Guess]:
    """The plans worth keeping of some degrees: for each micro-batch the cheapest options that fit,
    then other schedules.
    """
    least = float("inf")
    objective = settings.objective
    best: Guess | None = None
    for count in _counts(job, combination, settings):
        if (
            objective != "memory"
            and time_floor(job, machine, combination, settings, count) > MARGIN * found.least
        ):
            continue
        plain, needed = cheapest_that_fits(
            job, machine, _plan(combination, settings, count), settings, found
        )
        least = min(least, needed)
        is_usual = settings.fixed.allows_pipeline(PipelineAxis(combination.pp))
        options = [plain] if plain and is_usual else []
        worth = (
            plain is None
            or objective == "memory"
            or plain.step_seconds - plain.bubble_seconds < MARGIN * found.least
        )
        if combination.pp > 1 and worth:
            others = schedules(job.model, combination.pp, count)
            for pipeline in settings.fixed.pipelines(combination.pp, count, others):
                own = _plan(combination, settings, count, pipeline)
                if not (settings.allows(own) and suits(job.model, own)):
                    continue
                start = replace(plain.plan, pp=pipeline) if plain else own
                other, needed = cheapest_that_fits(job, machine, start, settings, found)
                least = min(least, needed)
                options += [other] if other else []
        for guess in options:
            found.least = min(found.least, guess.step_seconds)
            if best is None or score(guess, objective) < score(best, objective):
                best = guess
            yield guess
    if best is not None:
        found.of_degrees[combination] = best
    elif least < float("inf"):
        room = machine.memory.usable_bytes(_plan(combination, settings, 1))
        found.too_large[combination] = least / room


def cheapest_that_fits(
    job: Job, machine: Machine, plan: Plan, settings: SearchSettings, found: Found | None = None
) -> tuple[Guess | None, float]:
    """From `plan` on, the least sharding and recomputation that fits; and the least memory that was
    seen.
    """
    limit = machine.memory.usable_bytes(plan)
    node_ranks = machine.devices_per_node // (plan.tp.size * plan.cp.size)
    offered = data_axes(
        plan.dp.size,
        plan.cp.size,
        settings.framework.data,
        node_ranks,
        offloads=settings.offloads,
    )
    left = settings.fixed.data_axes(plan.dp.size, list(offered))
    axes = settings.allowed_data(plan, left)
    remats = settings.remats()
    if not axes or not remats:
        return None, float("inf")
    family = RoughFamily(job, plan, machine)
    known: dict[tuple[DataAxis, Remat], RoughPlan] = {}

    def guessed(data: DataAxis, remat: Remat) -> RoughPlan:
        if (data, remat) not in known:
            known[data, remat] = family.member(data, remat)
            if found is not None:
                found.num_guesses += 1
        return known[data, remat]

    best: Guess | None = None
    try:
        plain = guessed(axes[0], remats[0])
        smallest = plain if plain.memory_bytes <= limit else guessed(axes[-1], remats[-1])
        if smallest.memory_bytes > limit or smallest is plain:
            return (plain.guess if smallest is plain else None), smallest.memory_bytes
        for data in axes:
            if best is not None and (best.plan.remat == remats[0] or data.offload):
                break
            if guessed(data, remats[-1]).memory_bytes > limit:
                continue
            fits = next(
                one.guess for remat in remats if (one := guessed(data, remat)).memory_bytes <= limit
            )
            best = fits if best is None or fits.step_seconds < best.step_seconds else best
    except PlanError:
        return None, float("inf")
    return best, smallest.memory_bytes


def _plan(
    combination: Degrees,
    settings: SearchSettings,
    micro_batches: int,
    pipeline: PipelineAxis | None = None,
) -> Plan:
    return Plan(
        dp=DataAxis(combination.dp),
        tp=combination.tp,
        pp=pipeline or PipelineAxis(combination.pp),
        ep=combination.ep,
        cp=combination.cp,
        micro_batches=micro_batches,
        precision=settings.precision,  # type: ignore[arg-type]
        compile=settings.compile,
    )
