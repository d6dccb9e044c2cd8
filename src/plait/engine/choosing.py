"""Which library multiplies in a run: one table for all its ranks, measured by one of them.

The table is kept with the machine's other measurements, so that the next run chooses alike. Ranks
without a folder of measurements (simulated ones, those of tests) take the fixed rule.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from plait.cluster.products import (
    FILE_NAME,
    RULE,
    TORCH,
    ProductTable,
    keep_table,
    read_table,
)
from plait.comm import World
from plait.engine.precision import Precision
from plait.errors import ClusterError
from plait.plan import Plan
from plait.products import MEASURED, fixed_table
from plait.products.measure import measure, this_machine

if TYPE_CHECKING:
    from plait.engine.options import Options


def agreed_table(
    choice: str | ProductTable,
    world: World,
    compute: torch.dtype = torch.float32,
    run_file: Path | None = None,
) -> ProductTable:
    """The table of all ranks. Collective where `choice` is `measured`.

    Only float32 on a CPU has two libraries; `compute` is the plan's precision. `run_file` holds
    the table of a run that is continued, which goes before the machine's. Errors: `PlanError` for
    an unknown word.
    """
    if isinstance(choice, ProductTable):
        return choice
    if choice != MEASURED:
        return fixed_table(choice)
    if world.device.type != "cpu" or compute != torch.float32:
        return TORCH
    if world.measurements is None:
        return RULE
    axis = world.axis("world")
    own = None
    if axis.rank == 0:
        own = _table_of_run(run_file) if run_file is not None else None
        if own is None:
            own = table_here(world.measurements, may_measure=world.membership is None)
    table: ProductTable = axis.gather_objects(own)[0]
    return table


def chosen_options(options: Options, plan: Plan, world: World) -> Options:
    """The options of a build, with the table of all ranks in place of a choice. Collective."""
    compute = Precision.of(plan, float16=options.float16).compute
    table = agreed_table(options.linear_product, world, compute)
    return replace(options, linear_product=table)


def table_here(folder: Path, *, may_measure: bool = True, remeasure: bool = False) -> ProductTable:
    """This machine's table: the saved one unless `remeasure`, else a measured one, which is saved.
    A busy machine gets torch's own products.

    Ranks that come and go begin one by one beside others at work, so they do not measure.
    """
    path = folder.expanduser() / FILE_NAME
    machine = this_machine()
    saved = read_table(path, machine)
    if (saved is not None and not remeasure) or not may_measure:
        return saved or TORCH
    found = measure()
    if found.is_steady:
        keep_table(path, machine, found.table)
    elif saved is not None:
        return saved
    return found.table


def _table_of_run(path: Path) -> ProductTable | None:
    """The table that a run began with; None where it began on another processor."""
    try:
        kept = json.loads(path.read_text())
        if kept["machine"] != str(this_machine()):
            return None
        return ProductTable.from_dict(kept["table"])
    except (OSError, ValueError, LookupError, TypeError, ClusterError):
        return None


def write_table_of_run(path: Path, table: ProductTable) -> None:
    """Keep a run's table in its folder, for runs that continue it."""
    whole = {"machine": str(this_machine()), "table": table.as_dict()}
    path.write_text(json.dumps(whole, indent=2) + "\n")
