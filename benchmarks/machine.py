"""The machine that a table was made on: a line that every script here prints above its own."""

from __future__ import annotations

import os

import torch

from plait.cluster.products import processor_name


def machine_line() -> str:
    """The processor's name, the cores that this process may use, and the version of torch."""
    cores = len(os.sched_getaffinity(0))
    return f"processor: {processor_name()}, {cores} cores; torch {torch.__version__}"


def announce() -> None:
    """Print the line."""
    print(machine_line() + "\n", flush=True)
