"""Contents of a run folder beside the prediction: the plan, its numbers, measured and simulated
steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plait.errors import ConfigError, PlaitError
from plait.mesh import Mesh
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.observed import (
    median_step,
    observed_bubble,
    observed_costs,
    simulated_step,
)
from plait.parallel.pipeline.text import load
from plait.plan import Plan
from plait.run.rundir import RunFolder
from plait.run.runfiles import metrics_of, summary_of, text_of, timeline_of
from plait.trace import Timeline
from plait.values import JsonMapping, JsonObject


@dataclass(frozen=True)
class Prediction:
    """A step from the cost model, before anything ran: its timeline, its seconds, and the whole
    estimate by its keys.
    """

    cluster: str
    timeline: Timeline
    numbers: JsonMapping


@dataclass(frozen=True)
class RunData:
    """`steps` are the traced steps by number; `simulated`: the schedule, with the mean times of the
    shown step's actions. A run that stopped early has neither.
    """

    folder: Path
    plan: Plan
    summary: JsonMapping
    metrics: tuple[JsonMapping, ...]
    steps: Mapping[int, Timeline]
    simulated: Timeline | None
    prediction: Prediction | None
    why_no_prediction: str = ""

    @property
    def shown(self) -> int:
        """The number of the step of median length."""
        middle = median_step(list(self.steps.values()))
        return next(number for number, step in self.steps.items() if step is middle)

    @property
    def measured_seconds(self) -> float | None:
        """The median length of the traced steps, from the first action to the last."""
        if not self.steps:
            return None
        return statistics.median(step.seconds for step in self.steps.values())

    @property
    def num_steps(self) -> int:
        """The steps that the run has made."""
        last = self.metrics[-1]["step"] if self.metrics else 0
        return int(self.summary.get("steps") or last)

    def numbers(self) -> JsonObject:
        """The keys of `plait report --json`."""
        predicted = self.prediction
        simulated = self.simulated
        bubbles = [observed_bubble(step) for step in self.steps.values()]
        return {
            "plan": str(self.plan),
            "steps": self.num_steps,
            "traced_steps": list(self.steps),
            "measured_step_seconds": self.measured_seconds,
            "simulated_step_seconds": None if simulated is None else simulated.seconds,
            "predicted_step_seconds": None
            if predicted is None
            else predicted.numbers["step_seconds"],
            "predicted_for": None if predicted is None else predicted.cluster,
            "measured_bubble_fraction": statistics.median(bubbles) if bubbles else None,
            "simulated_bubble_fraction": None if simulated is None else observed_bubble(simulated),
            "predicted_bubble_fraction": None
            if predicted is None
            else predicted.numbers["bubble_fraction"],
        }


def read_run(path: Path) -> RunData:
    """Read a run's folder. Errors: `ConfigError` that names the file which is missing or cannot be
    read.

    A run that was killed has written neither a trace nor a summary, and perhaps no step.
    """
    folder = RunFolder(path)
    if not folder.plan.exists() and not folder.doctor.is_dir():
        raise ConfigError(f"{path} is no folder of a run; plait train --out DIR makes one")
    text = text_of(folder.plan)
    if not text.strip():  # an empty plan would be dp1, and the run's was another
        raise ConfigError(f"{folder.plan} is empty; a run writes its plan there")
    plan = Plan.parse(text).check()
    if not folder.trace.exists() and not folder.summary.exists():
        metrics = metrics_of(folder.metrics) if folder.metrics.exists() else ()
        return RunData(path, plan, {}, metrics, {}, None, *predict(folder.config, plan))
    steps = timeline_of(folder.trace).by_label("step")
    if not steps:
        raise ConfigError(
            f"{folder.trace} has no steps to draw; train with this version, at least one step"
        )
    metrics = metrics_of(folder.metrics)
    from plait.predict.cost.step_timeline import schedule_of

    own_schedule = load(folder.schedule) if folder.schedule.exists() else None
    prediction, why = (
        predict(folder.config, plan)
        if own_schedule is None
        else (None, "the cost model knows no schedule of your own")
    )
    schedule = schedule_of(plan, len(steps)) if own_schedule is None else lower(own_schedule)
    seen = list(steps.values()) if schedule.asynchronous else [median_step(list(steps.values()))]
    simulated = simulated_step(schedule, observed_costs(seen, statistics.fmean))
    return RunData(
        path, plan, summary_of(folder.summary), metrics, steps, simulated, prediction, why
    )


def predict(config: Path | JsonMapping, plan: Plan) -> tuple[Prediction | None, str]:
    """The cost model's step on the config's cluster; None and the reason where it has no answer."""
    from plait.predict.cost.api import cluster_of, estimate, job_of
    from plait.predict.cost.machines import machine_of
    from plait.predict.cost.model.tables import config_tables
    from plait.predict.cost.step_timeline import step_timeline

    try:
        known = config_tables(config)
        cluster = cluster_of(known, None)
        guess = estimate(known, plan, cluster)
        timeline = step_timeline(job_of(known, plan), plan, machine_of(cluster))
    except PlaitError as error:
        return None, str(error)
    return Prediction(cluster.name, timeline, guess.as_dict()), ""


def lines_of(plan: Plan) -> tuple[int, ...]:
    """The ranks of the first pipeline line: those that a simulated timeline stands for."""
    return Mesh.of(plan).line(0, "pp")
