"""Runs one cell on the pool's ranks and judges it: `ok`, `refused` (an error of plait, alike on
every rank), `failed`; or `undecided` where rounding alone moves one device as far.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from plait.comm import World
from plait.errors import PlaitError, RunError
from plait.parallel.pipeline.schedules import SCHEDULES
from plait.plan import Plan
from plait.verify.record.compare import differences, largest, relative_error
from tests.helpers.pool import RanksFailed
from tests.parity import delayed, harness
from tests.parity.generator.cell import Cell

Run = Callable[..., list[Any]]


@dataclass(frozen=True)
class Verdict:
    """What became of a cell. `error` is the largest relative one, of `kind` (loss, grad, param,
    norm) and tensor `worst`.
    """

    status: str
    error: float = 0.0
    kind: str = ""
    worst: str = ""
    message: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def judge(run: Run, cell: Cell) -> Verdict:
    """Run `cell`; `run` is the pool's."""
    began = time.monotonic()
    try:
        verdict = _judge(run, cell)
    except (RanksFailed, AssertionError) as error:
        verdict = Verdict("failed", float("inf"), "crash", "", str(error)[-6000:])
    return Verdict(**{**asdict(verdict), "seconds": round(time.monotonic() - began, 2)})


def _judge(run: Run, cell: Cell) -> Verdict:
    results = run(
        cell.world_size,
        on_rank,
        cell,
        plan=cell.plan,
        timeout_seconds=300.0,
        group_timeout_seconds=240.0,
    )
    refused = {result for result in results if isinstance(result, str)}
    if len(refused) > 1 or (refused and not all(isinstance(result, str) for result in results)):
        return Verdict(
            "failed", float("inf"), "refusal", "", f"ranks do not refuse alike: {sorted(refused)}"
        )
    if refused:
        return Verdict("refused", message=refused.pop())
    plan = Plan.parse(cell.plan)
    errors = (
        _delayed_errors(cell, plan, results)
        if _asynchronous(plan)
        else _errors(cell, plan, results)
    )
    kind, (error, worst) = max(errors.items(), key=lambda item: item[1][0])
    if all(error <= harness.TOLERANCE for error, _ in errors.values()):
        return Verdict("ok", error, kind, worst)
    drift = 0.0 if _asynchronous(plan) else _drift(cell, plan)
    if error <= 30 * drift:
        message = f"one device against itself, started one bit aside, drifts by {drift:.1e}"
        return Verdict("undecided", error, kind, worst, message)
    return Verdict("failed", error, kind, worst)


def on_rank(world: World, cell: Cell) -> Any:
    """What this rank has seen; the message where building was refused."""
    family = cell.family
    plan = Plan.parse(cell.plan)
    if _asynchronous(plan):
        family = delayed.untied(family)
    try:
        engine = harness.make_engine(world, cell.plan, family, cell.options)
        return (
            delayed.train(engine, family)
            if _asynchronous(plan)
            else harness.train(engine, family, cell.num_samples)
        )
    except RunError:
        raise
    except PlaitError as error:
        return str(error)


def _asynchronous(plan: Plan) -> bool:
    return plan.pp.size > 1 and SCHEDULES[plan.pp.schedule].facts.asynchronous


def _errors(cell: Cell, plan: Plan, results: list[Any]) -> dict[str, tuple[float, str]]:
    harness._REFERENCES.clear()
    outcome = harness.compare(
        results, harness.reference(cell.family, plan, cell.num_samples, cell.options), cell.clip
    )
    return {
        kind: (getattr(outcome, kind), outcome.worst.get(kind, ""))
        for kind in ("loss", "grad", "param", "norm")
    }


def _drift(cell: Cell, plan: Plan) -> float:
    """How far one device gets from itself where it starts one bit aside: a choice among equals
    (experts) may go either way.
    """
    known, aside = (
        harness.reference(cell.family, plan, cell.num_samples, cell.options, aside=flag)
        for flag in (False, True)
    )
    return max(one.error for one in differences(aside, known) if one.kind != "start")


def _delayed_errors(cell: Cell, plan: Plan, results: list[Any]) -> dict[str, tuple[float, str]]:
    """Against one device that applies the same delayed gradients."""
    per_stage = results[:: plan.world_size // plan.pp.size]
    stages = [[name for name, *_ in rank["parts"]] for rank in per_stage]
    expected = delayed.reference(cell.plan, cell.family, stages)
    found = {"loss": (0.0, ""), "param": (0.0, "")}
    scale = largest(expected.params)
    for rank in results:
        for step, (mine, truth) in enumerate(zip(rank["losses"], expected.losses, strict=True)):
            found["loss"] = max(found["loss"], (abs(mine - truth) / abs(truth), f"step {step}"))
    for name, value in harness.join([rank["parts"] for rank in results]).items():
        truth = expected.params[name]
        found["param"] = max(
            found["param"], (relative_error(value.view_as(truth), truth, scale), name)
        )
    return found
