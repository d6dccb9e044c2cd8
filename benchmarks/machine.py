"""The machine that a table was made on: a line that every script here prints above its own."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from plait.cluster.products import processor_name


def machine_line() -> str:
    """The processor's name, the cores that this process may use, and the version of torch."""
    cores = len(os.sched_getaffinity(0))
    return f"processor: {processor_name()}, {cores} cores; torch {torch.__version__}"


def announce() -> None:
    """Print the line."""
    print(machine_line() + "\n", flush=True)


def versions_of(*packages: str) -> str:
    """The installed versions of packages that only this benchmark takes. Exit 2: one is missing."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            print(f"{name} is not installed, and this benchmark compares with it", file=sys.stderr)
            print(f"  pip install -c constraints.txt {' '.join(packages)}", file=sys.stderr)
            raise SystemExit(2) from None
    return ", ".join(f"{name} {number}" for name, number in found.items())
