"""`script_for`: the script of one target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from plait.errors import ConfigError, nearest
from plait.jobs import kubernetes, ray, skypilot, slurm, torchrun
from plait.jobs.job import JobScript, TrainJob

TARGETS: Final[dict[str, Callable[[TrainJob], JobScript]]] = {
    "slurm": slurm.script,
    "kubernetes": kubernetes.script,
    "torchrun": torchrun.script,
    "skypilot": skypilot.script,
    "ray": ray.script,
}


def target_of(word: str) -> str:
    """The name in `TARGETS` that a word stands for. Errors: `ConfigError` for another word."""
    name = {"k8s": "kubernetes", "sky": "skypilot"}.get(word.lower(), word.lower())
    if name not in TARGETS:
        raise ConfigError(f"no script for {word!r}; {nearest(name, TARGETS)}")
    return name


def script_for(target: str, job: TrainJob, config_text: str = "") -> JobScript:
    """The script of a job for one of `TARGETS`; `config_text` goes into manifests that carry it.

    Errors: `ConfigError` for another name, and for a run's folder that would not be kept.
    """
    name = target_of(target)
    if name == "kubernetes":
        return kubernetes.script(job, config_text)
    return TARGETS[name](job)
