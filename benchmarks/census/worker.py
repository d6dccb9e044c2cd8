"""A process that judges classes: a line `task family plan|plan` in, a marked line a cell out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import torch

from benchmarks.census.cell import Cell, judge
from benchmarks.census.configs import tiny
from plait.models import hf

MARK = "cell: "
"""The begin of an answer's line; what else is printed is a library's."""


def judged(task: str, family: str, plans: list[str]) -> Iterator[Cell]:
    """The cells of one class; one without a plan where no tiny config runs."""
    begin = time.perf_counter()
    try:
        table = tiny(task, family)
    except Exception as refusal:  # a family's config class may fail in its own way
        reason = " ".join(str(refusal).split())
        yield Cell(task, family, "", "unbuilt", reason, time.perf_counter() - begin)
        return
    for plan in plans:
        yield judge(task, table, plan)


def serve() -> None:
    """Answer lines of stdin until it ends; an empty object ends each answer."""
    torch.set_num_threads(1)
    hf.library().logging.set_verbosity_error()
    for line in sys.stdin:
        task, family, *rest = line.split(maxsplit=2)
        for cell in judged(task, family, rest[0].strip().split("|")):
            print(MARK + json.dumps(cell.as_dict()), flush=True)
        print(f"{MARK}{{}}", flush=True)
