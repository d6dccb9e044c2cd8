"""The systems that ranks run on: what they have, and what some of them lack."""

from __future__ import annotations

import os

from plait.errors import RunError


def check_system() -> None:
    """Refuse to run ranks where the system has no signals, locks and limits of Unix.

    Raises:
        RunError: on Windows, with the ways around it.
    """
    if os.name != "posix":
        raise RunError(
            f"ranks run on Linux and macOS alone, and this system is {os.name!r}; on Windows "
            "install plait inside WSL (wsl --install); plans and predictions, such as plait plan "
            "and plait.choose, work here too"
        )


def own_cores() -> frozenset[int]:
    """The numbers of the cores that this process may use; of all where the system does not say."""
    if hasattr(os, "sched_getaffinity"):  # Linux alone has it
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
