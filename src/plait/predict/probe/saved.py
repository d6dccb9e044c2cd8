"""Saved measurements of this machine: read, judged usable, and measured where they are missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cluster import Cluster, hold_probe, probe_path, read_probe
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
    path = probe_path()
    probe = read_probe(path)
    if probe is None or (probe.get("is_cpu", True) and not is_complete(probe)):
        probe = _measured(path)
    sentence = warning(probe)
    if sentence is not None:
        say(sentence)


def ensure_probe_together(meeting: Axis) -> None:
    """Measure in a world that has begun, where a rank has no usable measurements. Collective."""
    path = probe_path()
    probe = read_probe(path)
    if any(meeting.gather_objects(probe is None or not is_usable(probe))):
        _measured(path, meeting.size)


def _measured(path: Path, num_ranks: int | None = None) -> dict[str, object]:
    """New measurements, in their file, or held by this process alone where that cannot be."""
    fault = _fault(path)
    if fault is None:
        return measure_here(path, num_ranks)
    say(
        f"plait: {fault}, so every command measures this machine again; XDG_CACHE_HOME names "
        "another folder"
    )
    probe = measure_here(None, num_ranks)
    hold_probe(path, probe)
    return probe


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
    fault = _fault(out)
    if fault is not None:
        raise ConfigError(f"{fault}; name another file by --out")


def _fault(out: Path) -> str | None:
    """The sentence about a file that cannot be written; None for one that can."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            return f"{out} cannot be written: it is a folder"
        can_be = os.access(out if out.exists() else out.parent, os.W_OK)
    except OSError as error:
        return f"{out} cannot be written: {error.strerror}"
    return None if can_be else f"{out} cannot be written: no permission"
