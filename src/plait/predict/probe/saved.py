"""Saved measurements of this machine: read, judged usable, and measured where they are missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cluster import DEFAULT_PROBE_PATH, Cluster, read_probe
from plait.errors import ClusterError, ConfigError
from plait.launcher.main_process import say
from plait.predict.probe.measure import measure_here
from plait.predict.probe.quiet import warning

if TYPE_CHECKING:
    from plait.comm import Axis


def ensure_probe() -> None:
    """Measure this machine where no measurements are kept; cluster `local` means them from then on.

    Numbers from a world of torchrun lack how ranks share the cores of a processor. They are
    measured again here.
    """
    path = DEFAULT_PROBE_PATH.expanduser()
    probe = read_probe(path)
    if probe is None or (probe.get("is_cpu", True) and not is_complete(probe)):
        check_writable(path)
        probe = measure_here(path)
    sentence = warning(probe)
    if sentence is not None:
        say(sentence)


def ensure_probe_together(meeting: Axis) -> None:
    """Measure in a world that has begun, where a rank has no usable measurements. Collective."""
    path = DEFAULT_PROBE_PATH.expanduser()
    probe = read_probe(path)
    if any(meeting.gather_objects(probe is None or not is_usable(probe))):
        check_writable(path)
        measure_here(path, meeting.size)


def is_complete(probe: dict[str, object]) -> bool:
    """Whether a probe holds all that this version asks of a processor."""
    return is_usable(probe) and probe.get("host") is not None


def is_usable(probe: dict[str, object]) -> bool:
    """Whether a cluster can be made of a probe."""
    try:
        Cluster.local(probe)
    except ClusterError:
        return False
    return True


def check_writable(out: Path) -> None:
    """Raises `ConfigError` for a file that cannot be written, before anything is measured."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    if not os.access(out if out.exists() else out.parent, os.W_OK) or out.is_dir():
        raise ConfigError(f"{out} cannot be written")
