"""`plait calibrate`: the planner's constants from runs of one's own, in a cluster file."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli import common
from plait.cli.answer import Answer, Json
from plait.cli.parser import UsageError
from plait.cluster.calibration import FACTORS, Calibration
from plait.errors import ConfigError
from plait.toml import parse_json, read_toml, write_toml

if TYPE_CHECKING:
    from plait.cluster import Cluster
    from plait.predict.cost.calibrate import MeasuredStep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait calibrate`."""
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN_DIR",
        help="folders of runs on that cluster, as plait train --out names them",
    )
    parser.add_argument(
        "--step",
        nargs=3,
        action="append",
        default=[],
        metavar=("CONFIG", "PLAN", "SECONDS"),
        help="a step that was measured elsewhere; may be given several times",
    )
    common.add_cluster(parser)
    common.add_framework(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the cluster file to write"
    )


def run(arguments: argparse.Namespace) -> Answer:
    """The factors, their uncertainty, and the file. Errors: `ConfigError`, and those of
    `plait estimate`.

    Raises:
        UsageError: neither a run nor a step is given.
    """
    from plait.cluster import Cluster
    from plait.predict.cost.api import cluster_name
    from plait.predict.cost.calibrate import calibrate, doubts
    from plait.predict.cost.model.tables import config_tables

    common.check_writable(arguments.out)
    steps = [_of_run(folder, arguments.framework) for folder in arguments.runs]
    steps += [_given(words, arguments.framework) for words in arguments.step]
    if not steps:
        raise UsageError("calibrate needs a RUN_DIR or --step CONFIG PLAN SECONDS")
    name = arguments.cluster or cluster_name(config_tables(steps[0].config))
    common.measured(name)
    cluster = Cluster.parse(name)
    found = calibrate(steps, cluster)
    arguments.out.write_text(cluster_text(name, cluster.num_devices, found.as_dict()))
    data: Json = {"out": str(arguments.out), "cluster": name, **found.as_dict()}
    data["steps"] = [
        {"plan": str(step.plan), "seconds": step.seconds, **_errors(step, cluster, found)}
        for step in steps
    ]
    data["warnings"] = doubts(found, steps, cluster)
    return Answer(data, _view(data))


def cluster_text(name: str, num_devices: int, calibration: Json) -> str:
    """The cluster file: what `name` is, with the factors."""
    from plait.cluster.presets import PRESETS

    if name in PRESETS or name == "local" or name.rpartition("x")[0] in PRESETS:
        preset = name if name in PRESETS or name == "local" else name.rpartition("x")[0]
        tables: Json = {"device": {"preset": preset}}
        tables = tables if name == "local" else {"count": num_devices, **tables}
    else:
        tables = read_toml(name, ConfigError)
    tables = {**tables, "calibration": calibration}
    single = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    lines = [f"{key} = {value}\n" for key, value in single.items()]
    sections = {key: value for key, value in tables.items() if isinstance(value, dict)}
    return "".join(lines) + write_toml(sections)


def _of_run(folder: Path, framework: str) -> MeasuredStep:
    """The measured step of a run's folder."""
    from plait.predict.cost.calibrate import MeasuredStep
    from plait.run.rundir import RunFolder

    paths = RunFolder(common.run_folder(folder))
    try:
        summary = parse_json(paths.summary.read_text(encoding="utf-8"))
        plan = paths.plan.read_text(encoding="utf-8").strip()
    except OSError as error:
        missing = Path(error.filename).name
        raise ConfigError(
            f"{folder} has no {missing}, so no run has ended there; name the folder that "
            "plait train --out was given"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{paths.summary} is not JSON: {error}") from None
    seconds = summary.get("step_seconds_median") if isinstance(summary, dict) else None
    if not isinstance(seconds, (int, float)):
        raise ConfigError(f"{paths.summary}: step_seconds_median is missing; let a run end first")
    return MeasuredStep(str(paths.config), plan, float(seconds), framework)


def _given(words: list[str], framework: str) -> MeasuredStep:
    """A step that the command line gives; its CONFIG may be a known model."""
    from plait.predict.cost.calibrate import MeasuredStep
    from plait.predict.cost.model.tables import read_config

    config, plan, seconds = words
    try:
        return MeasuredStep(read_config(config, []), plan, float(seconds), framework)
    except ValueError:
        raise ConfigError(f"--step: '{seconds}' is no number of seconds") from None


def _errors(step: MeasuredStep, before: Cluster, found: Calibration) -> Json:
    """The relative errors of the prediction of a step, without and with the factors."""
    from plait.predict.cost.calibrate import log_ratio, prepared

    asked = prepared(step)
    return {
        "error_before": math.expm1(-log_ratio(asked, before, Calibration())),
        "error_after": math.expm1(-log_ratio(asked, before, found)),
    }


def _view(data: Json) -> str:
    lines = [
        f"{name:<14} {data[name]:.3f} of the predicted seconds, +-{data[f'{name}_sd']:.0%}"
        for name in FACTORS
        if data[f"{name}_sd"]
    ]
    lines += [
        f"{step['plan']}: {step['seconds']:.4g} s measured, predicted {step['error_before']:+.1%} "
        f"before and {step['error_after']:+.1%} now"
        for step in data["steps"]
    ]
    lines.append(f"time bars are {data['time_bar']:.0%} as wide; written to {data['out']}")
    lines += [f"warning: {doubt}" for doubt in data["warnings"]]
    return "\n".join(lines)
