"""`plait calibrate`: the planner's constants from steps that were measured on one's own cluster.

Three factors are found: on the seconds of computing, of communicating and of the host. Without any
measurement each logarithm has a normal law, as wide as clusters differ. Steps of Gauss and Newton
find the most probable factors. The curvature at the end is their uncertainty (Bishop, "Pattern
Recognition and Machine Learning", section 4.4). Bars are as wide as that, and wide enough for the
measured steps themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from plait.cluster import Cluster
from plait.cluster.calibration import FACTORS, Calibration
from plait.errors import ConfigError
from plait.plan import Plan
from plait.predict.cost import bars
from plait.predict.cost.api import check_question, job_of
from plait.predict.cost.frameworks import Framework, framework_of
from plait.predict.cost.machines import machine_of
from plait.predict.cost.model.tables import config_tables
from plait.predict.cost.records import Estimate, Job
from plait.predict.cost.step import estimate_job
from plait.values import JsonObject

PRIOR: Final[Mapping[str, float]] = {"compute": 0.12, "communication": 0.35, "host": 0.35}
"""Differences of clusters from the planner's constants: standard deviations of logarithms, those of
published sources; see `benchmarks.planner.calibrated`.
"""
NOISE: Final = 0.1
"""Differences of runs of one cluster from each other once its factors are known."""
NARROWEST: Final = 0.3
"""The narrowest that measured steps make a bar, of the usual one."""
WIDEST: Final = 5.0
"""The widest bar that steps which contradict the model make, of the usual one."""
FAR: Final = math.log(1.5)
"""The logarithm from which on a step that was fitted is said to be far off."""
FARTHEST: Final = math.log(1e4)
"""The logarithm from which on seconds are of another unit, cluster or model, and fit no factors."""
ROUNDS: Final = 8
MOST: Final = 2.0
"""The largest logarithm of a factor."""
STEP: Final = 0.02
"""Change of a logarithm by which effects are found."""


@dataclass(frozen=True)
class MeasuredStep:
    """A plan of a config that ran, and the seconds of its step."""

    config: Any
    plan: Plan | str | None
    seconds: float
    framework: Framework | str = "plait"


@dataclass(frozen=True)
class AskedStep:
    """A measured step as the cost model asks it."""

    job: Job
    plan: Plan
    seconds: float


def calibrate(steps: Sequence[MeasuredStep], cluster: Cluster | str) -> Calibration:
    """The factors of a cluster from measured steps. Raises `ConfigError` without steps or for
    seconds that cannot be, and the errors of `plait.estimate`.
    """
    if not steps:
        raise ConfigError("no step was measured; name a run, or give --step")
    wrong = [step.seconds for step in steps if not (0 < step.seconds < math.inf)]
    if wrong:
        raise ConfigError(f"a measured step took {wrong[0]:g} s; seconds are finite and above 0")
    place = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    asked = [prepared(step) for step in steps]
    for step in asked:
        _refuse_beyond_reach(step, place)
    names = FACTORS if place.profile is None else FACTORS[:1]
    found = fitted(len(asked), lambda at, factors: log_ratio(asked[at], place, factors), names)
    return widened(found, [residual_of(step, place, found) for step in asked])


def _refuse_beyond_reach(step: AskedStep, place: Cluster) -> None:
    """Raises `ConfigError` for seconds that no factors explain: nothing can be learnt from them."""
    ratio = log_ratio(step, place, Calibration())
    if abs(ratio) > FARTHEST:
        predicted = step.seconds / math.exp(ratio)
        raise ConfigError(
            f"{step.plan} took {step.seconds:g} s, and {predicted:.3g} s are predicted for "
            f"{place.name}, {math.exp(abs(ratio)):.2g} times {'less' if ratio > 0 else 'more'}; "
            "name the seconds of one step, on the cluster and with the config that ran"
        )


def fitted(
    count: int, ratio: Callable[[int, Calibration], float], names: Sequence[str] = FACTORS
) -> Calibration:
    """The most probable factors; `ratio` is the logarithm of measured over predicted seconds of a
    step under factors.
    """
    logs = dict.fromkeys(names, 0.0)
    inverse: list[list[float]] = []
    effects: list[list[float]] = []
    for _ in range(ROUNDS):
        start = [ratio(row, _calibration(logs)) for row in range(count)]
        effects = [_slopes(partial(ratio, row), start[row], logs) for row in range(count)]
        inverse, moves = _newton(effects, start, [logs[name] for name in names], names)
        logs = {
            name: min(max(logs[name] + move, -MOST), MOST)
            for name, move in zip(names, moves, strict=True)
        }
        if max(map(abs, moves)) < 1e-3:
            break
    numbers: JsonObject = {name: math.exp(log) for name, log in logs.items()}
    numbers |= {f"{name}_sd": math.sqrt(inverse[at][at]) for at, name in enumerate(names)}
    return Calibration(**numbers, time_bar=_bar_width(effects, inverse, names), runs=count)


def widened(found: Calibration, residuals: Sequence[tuple[float, str]]) -> Calibration:
    """The factors with bars that hold the measured steps, up to `WIDEST`.

    Each residual is that of `residual_of`.
    """
    needed = max(bars.width_for(ratio, place) for ratio, place in residuals)
    return replace(found, time_bar=max(found.time_bar, min(WIDEST, needed)))


def doubts(found: Calibration, steps: Sequence[MeasuredStep], cluster: Cluster) -> list[str]:
    """Factors at their bounds, and steps that are far off under the factors."""
    words = [
        f"{name} is at its bound, {getattr(found, name):.3g} times the predicted seconds; are the "
        "measured numbers seconds?"
        for name in FACTORS
        if abs(math.log(getattr(found, name))) > MOST - STEP
    ]
    for step in steps:
        ratio = log_ratio(prepared(step), cluster, found)
        if abs(ratio) > FAR:
            words.append(
                f"{step.plan} took {math.exp(ratio):.3g} times the seconds that are predicted now; "
                f"are {step.seconds:g} seconds meant, and is {cluster.name} the cluster?"
            )
    return words


def _slopes(
    ratio: Callable[[Calibration], float], start: float, logs: Mapping[str, float]
) -> list[float]:
    """By how much a step's logarithm grows with that of each factor, by a difference from
    `start`.
    """
    slopes = []
    for name, log in logs.items():
        moved = _calibration({**logs, name: log + STEP})
        slopes.append((start - ratio(moved)) / STEP)
    return slopes


def _calibration(logs: Mapping[str, float]) -> Calibration:
    numbers: JsonObject = {name: math.exp(log) for name, log in logs.items()}
    return Calibration(**numbers)


def prepared(step: MeasuredStep) -> AskedStep:
    """The step with its config read once. Raises the errors of `plait.estimate`."""
    tables = config_tables(step.config)
    plan = check_question(tables, step.plan, step.framework)
    job = job_of(tables, plan, framework_of(step.framework), num_devices=plan.world_size)
    return AskedStep(job, plan, step.seconds)


def log_ratio(step: AskedStep, place: Cluster, factors: Calibration) -> float:
    """The logarithm of measured over predicted seconds, under factors."""
    return residual_of(step, place, factors)[0]


def residual_of(step: AskedStep, place: Cluster, factors: Calibration) -> tuple[float, str]:
    """The logarithm of measured over predicted seconds under factors, and the step's reach.

    The reach is one device, a node or several nodes, as in `bars.reach`.
    """
    guess = _predicted(step, place, factors)
    return math.log(step.seconds / guess.step_seconds), guess.reach


def _predicted(step: AskedStep, place: Cluster, factors: Calibration) -> Estimate:
    """The prediction of a step under factors."""
    sized = place if place.profile is not None else place.with_num_devices(step.plan.world_size)
    machine = machine_of(replace(sized, calibration=factors))
    return estimate_job(step.job, step.plan, machine)


def _newton(
    effects: Sequence[Sequence[float]],
    residuals: Sequence[float],
    logs: Sequence[float],
    names: Sequence[str],
) -> tuple[list[list[float]], list[float]]:
    """The covariance of the factors' logarithms, and how far to move them."""
    size = len(names)
    curvature = [[0.0] * size for _ in range(size)]
    slope = [0.0] * size
    for at, name in enumerate(names):
        curvature[at][at] = 1 / PRIOR[name] ** 2
        slope[at] = -logs[at] / PRIOR[name] ** 2
    for row, residual in zip(effects, residuals, strict=True):
        for i in range(size):
            slope[i] += row[i] * residual / NOISE**2
            for j in range(size):
                curvature[i][j] += row[i] * row[j] / NOISE**2
    covariance = inverse_of(curvature)
    moves = [sum(covariance[i][j] * slope[j] for j in range(size)) for i in range(size)]
    return covariance, moves


def _bar_width(
    effects: Sequence[Sequence[float]], covariance: Sequence[Sequence[float]], names: Sequence[str]
) -> float:
    """Width of the bar of a run like those measured, over that of an unmeasured one."""
    size = len(names)
    after = before = 0.0
    for row in effects:
        before += NOISE**2 + sum((row[i] * PRIOR[name]) ** 2 for i, name in enumerate(names))
        after += NOISE**2
        after += sum(row[i] * covariance[i][j] * row[j] for i in range(size) for j in range(size))
    return min(1.0, max(NARROWEST, math.sqrt(after / before)))


def inverse_of(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Inverse of a small matrix that is positive definite, by elimination.

    >>> inverse_of([[2.0, 0.0], [0.0, 4.0]])
    [[0.5, 0.0], [0.0, 0.25]]
    """
    size = len(matrix)
    rows: list[list[float]] = []
    for at, row in enumerate(matrix):
        unit = [0.0] * size
        unit[at] = 1.0
        rows.append([*map(float, row), *unit])
    for at in range(size):
        pivot = rows[at][at]
        rows[at] = [value / pivot for value in rows[at]]
        for other in range(size):
            if other != at:
                factor = rows[other][at]
                rows[other] = [
                    value - factor * lead for value, lead in zip(rows[other], rows[at], strict=True)
                ]
    return [row[size:] for row in rows]
