"""The distance of a plan in bf16 or fp8 from float32, as a distribution. Rounding has no single
right answer, so none is asked for.

Three runs start alike: one device in float32, one device in the low precision, and the plan in it.
The drift of a tensor is the 2-norm of its difference from float32's, relative to float32's. One
device's drift is the yardstick. A plan rounds in other places, but not more often, so its
distribution must not lie far above. A wrong factor or a missing sum does.

A tensor whose true gradient is zero is left out, such as the bias of keys under a softmax. Its
float32 gradient is rounding, to which no drift is relative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from plait.comm import World
from plait.comm.simulated import simulate
from plait.errors import PlanError
from plait.mesh import Mesh
from plait.paths import not_walked
from plait.plan import Plan
from plait.values import JsonObject, PyTree
from plait.verify.asynchronous import is_asynchronous
from plait.verify.problem import Problem
from plait.verify.ranks import by_first, in_new_world, make_engine
from plait.verify.record.gathered import on_first_rank
from plait.verify.record.observation import Record
from plait.verify.record.observe import RankRecord, join, record_rank
from plait.verify.reference.one_device import (
    pooled_losses,
    run_reference,
    slicing_reasons,
)

KINDS = ("loss", "grad", "param")
QUANTILES = (0.1, 0.5, 0.9, 0.99, 1.0)
ALLOWED = 3.0  # times what one device drifts, at the median and at the 99th hundredth
LEAST = 2.0**-9  # a relative error that one rounding to bf16 makes is no drift
CANCELLED = LEAST**2  # of the rms of all gradients: float32 has nothing but rounding there


@dataclass(frozen=True)
class Drift:
    """The drifts of one kind over all tensors and steps, by quantile, of the plan and of one
    device.
    """

    quantiles: Mapping[float, float]
    one_device: Mapping[float, float]
    worst: str

    @property
    def ok(self) -> bool:
        """Whether the plan drifts as one device does."""
        return all(
            self.quantiles[q] <= max(ALLOWED * self.one_device[q], LEAST) for q in (0.5, 0.99)
        )

    def as_dict(self) -> JsonObject:
        """Both distributions, by the names of their quantiles, and whether they are alike."""
        return {
            "plan": {_name(q): value for q, value in self.quantiles.items()},
            "one_device": {_name(q): value for q, value in self.one_device.items()},
            "ok": self.ok,
        }


@dataclass(frozen=True)
class DriftReport:
    """The report of `plait verify --dtype bf16` or `fp8`; `kinds` are loss, grad and param."""

    kinds: Mapping[str, Drift]
    plan: str
    world_size: int
    num_steps: int
    notes: Sequence[str] = ()
    paths_not_walked: Sequence[str] = ()
    dtype: str = "bf16"

    @property
    def ok(self) -> bool:
        """Whether no kind drifts much further than one device."""
        return all(drift.ok for drift in self.kinds.values())

    def as_dict(self) -> JsonObject:
        """The keys of every verification, errors being the largest drifts, and the
        distributions.
        """
        kind = max(self.kinds, key=lambda kind: self.kinds[kind].quantiles[1.0])
        errors = {f"{kind}_error": drift.quantiles[1.0] for kind, drift in self.kinds.items()}
        drifts = {kind: drift.as_dict() for kind, drift in self.kinds.items()}
        worst = {
            "name": self.kinds[kind].worst,
            "kind": kind,
            "error": self.kinds[kind].quantiles[1.0],
        }
        return {
            "ok": self.ok, **errors, "worst": worst, "plan": self.plan,
            "world_size": self.world_size,
            "steps": self.num_steps, "dtype": self.dtype, "drift": drifts, "allowed": ALLOWED,
            "notes": list(self.notes),
            "paths_not_walked": list(self.paths_not_walked),
        }  # fmt: skip

    def text(self) -> str:
        """For people: a table of quantiles, the plan above one device."""
        verdict = (
            f"drifts from float32 as one device in {self.dtype} does"
            if self.ok
            else f"DRIFTS FURTHER than one device in {self.dtype}"
        )
        lines = [f"{self.plan}: {verdict} ({self.num_steps} steps, {self.world_size} ranks)"]
        lines.append(
            f"  {'relative to float32':<22}" + "".join(f"{_name(q):>10}" for q in QUANTILES)
        )
        for kind, drift in self.kinds.items():
            lines.append(
                f"  {kind + ', the plan':<22}"
                + "".join(f"{drift.quantiles[q]:>10.1e}" for q in QUANTILES)
            )
            lines.append(
                f"  {'  one device in ' + self.dtype:<22}"
                + "".join(f"{drift.one_device[q]:>10.1e}" for q in QUANTILES)
            )
            if not drift.ok:
                lines.append(
                    f"  -> {kind} is more than {ALLOWED:g} times as far off; worst: {drift.worst}"
                )
        lines += [f"  not walked: {name}" for name in self.paths_not_walked]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class DriftTask:
    """The task of the ranks; `plan` says bf16 or fp8."""

    problem: Problem
    plan: str
    steps: int


def drift(problem: Problem, plan: Plan, steps: int) -> DriftReport:
    """Measure the drift of a plan in bf16, or in fp8 where it says so. Raises PlanError for plans
    whose steps cannot be set beside those of one device.
    """
    if plan.precision != "fp8":
        plan = replace(plan, precision="bf16").check()
    if is_asynchronous(plan):
        raise PlanError(
            f"{plan.pp}: its updates are delayed, so what it drifts is not rounding; measure "
            f"pp{plan.pp.size}:1f1b"
        )
    report: DriftReport = in_new_world(in_world, DriftTask(problem, str(plan), steps))
    return report


def in_world(world: World, task: DriftTask) -> DriftReport:
    """The drift of a plan on the ranks of `world`; every rank returns an equal report.
    Collective.
    """
    records = on_first_rank(world, observe(world, task))
    taken = world.axis("world").gather_objects(world.paths.taken())
    report = by_first(world, lambda: _judge(world, task, records))
    return replace(report, paths_not_walked=not_walked(taken))


def observe(world: World, task: DriftTask) -> RankRecord:
    """The record of this rank."""
    problem = task.problem
    axis = world.axis("dp")
    engine = make_engine(problem, Plan.parse(task.plan), world)
    return record_rank(engine, islice(problem.loader(axis.rank, axis.size), task.steps), task.steps)


def _judge(world: World, task: DriftTask, records: Sequence[RankRecord]) -> DriftReport:
    problem = task.problem
    plan = Plan.parse(task.plan)
    model = problem.make_whole_model(torch.float32)
    batches = problem.batches(task.steps, torch.float32)
    notes = slicing_reasons(model, batches[0])
    pooled = bool(pooled_losses(model)) and plan.micro_batches > 1 and not notes
    how = {"by_slice": bool(notes), "by_micro_batch": pooled}
    truth = run_reference(model, batches, problem.recipe(), problem.slices(plan), **how)
    alone = replace(task, plan=f"precision:{plan.precision}")
    one_device = join(simulate(Mesh.of(Plan.parse(alone.plan)), observe, alone))
    run = (str(plan), world.size, task.steps)
    report = compared(join(records), one_device, truth, run, notes)
    return replace(report, dtype=plan.precision)


def compared(
    mine: Record,
    one_device: Record,
    truth: Record,
    run: tuple[str, int, int],
    notes: Sequence[str] = (),
) -> DriftReport:
    """The distributions of two rounded runs around one in float32; `run` is (plan, world size,
    steps).
    """
    cancelled = _cancelled(truth)
    drifts = _drifts(mine, truth, cancelled)
    yardstick = _drifts(one_device, truth, cancelled)
    kinds = {}
    for kind in KINDS:
        worst = max(drifts[kind], key=lambda name: drifts[kind][name])
        kinds[kind] = Drift(
            _quantiles(drifts[kind].values()), _quantiles(yardstick[kind].values()), worst
        )
    if cancelled:
        listed = ", ".join(sorted(cancelled))
        notes = [*notes, f"left out, because the true gradient is zero: {listed}"]
    return DriftReport(kinds, *run, notes)


def _cancelled(truth: Record) -> set[str]:
    """Names of the tensors whose gradient is rounding in every step, beside all gradients."""
    names: set[str] | None = None
    for step in truth.steps:
        grads = {name: grad for name, grad in step.grads.items() if grad is not None}
        count = sum(grad.numel() for grad in grads.values())
        squares = sum(float(grad.double().square().sum()) for grad in grads.values())
        least = CANCELLED * math.sqrt(squares / max(count, 1))
        small = {
            name
            for name, grad in grads.items()
            if grad.numel() and float(grad.double().norm()) < least * math.sqrt(grad.numel())
        }
        names = small if names is None else names & small
    return names or set()


def _drifts(mine: Record, truth: Record, left_out: set[str]) -> dict[str, dict[str, float]]:
    """The drift of each tensor in each step, by kind, but for the tensors left out."""
    drifts: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for step, (seen, known) in enumerate(zip(mine.steps, truth.steps, strict=True)):
        drifts["loss"][f"step {step}"] = abs(seen.loss - known.loss) / max(abs(known.loss), 1e-30)
        pairs: dict[str, tuple[Mapping[str, Tensor | None], Mapping[str, Tensor | None]]] = {
            "grad": (seen.grads, known.grads),
            "param": (seen.params, known.params),
        }
        for kind, (own, other) in pairs.items():
            for name, value in other.items():
                if value is not None and value.numel() and name not in left_out:
                    drifts[kind][f"{name} in step {step}"] = _distance(own.get(name), value)
    return drifts


def _distance(value: Tensor | None, truth: Tensor) -> float:
    size = float(truth.double().norm())
    gap = size if value is None else float((value.double() - truth.double()).norm())
    return gap / size if size else (0.0 if gap == 0.0 else math.inf)


def _quantiles(values: PyTree) -> dict[float, float]:
    ordered = sorted(values)
    return {
        q: ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1 if q else 0)]
        for q in QUANTILES
    }


def _name(quantile: float) -> str:
    return "max" if quantile == 1.0 else "median" if quantile == 0.5 else f"p{quantile * 100:g}"
