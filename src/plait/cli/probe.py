"""`plait probe`: measure this machine, so that `local` is a cluster like any other to `plan` and
`estimate`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.answer import Answer, Json
from plait.cli.parser import UsageError
from plait.cluster import probe_path
from plait.cluster.products import table_of_probe
from plait.launcher import joined_world
from plait.launcher.main_process import is_main_process
from plait.predict.probe.measure import measure_here, num_devices
from plait.predict.probe.saved import check_writable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait probe`."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write it (default: plait/probe.json in $XDG_CACHE_HOME or ~/.cache)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="do not measure more ranks than there are cores"
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks that measure together (default: one for each GPU, else for each core)",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Measure with one rank a device, all at once, as training would use them. Errors:
    `ConfigError` for the file.

    Raises:
        UsageError: fewer ranks than one.
    """
    out = arguments.out if arguments.out is not None else probe_path()
    check_writable(out)
    world = joined_world()
    if arguments.nproc is not None and arguments.nproc < 1:
        raise UsageError(f"--nproc is {arguments.nproc}; it must be 1 or more")
    num_ranks = arguments.nproc or (world.world_size if world else num_devices())
    result = measure_here(out, num_ranks, quick=arguments.quick, remeasure=True)
    return (
        Answer({"out": str(out), **result}, view(result, out))
        if is_main_process()
        else Answer(None)
    )


def view(result: Json, out: Path) -> RenderableType:
    """The numbers for people."""
    from rich.console import Group
    from rich.table import Table

    each = "each device" if not result["is_cpu"] else "each rank"
    lines = [f"{result['num_devices']} x {result['name']} ({each}, all at work at once)"]
    lines += [
        f"matrix product  {rate / 1e9:,.1f} Gflop/s in {name}"
        for name, rate in result["peak_flops"].items()
    ]
    lines.append(
        f"memory          {result['memory_bandwidth'] / 1e9:,.1f} GB/s, "
        f"{result['memory_bytes'] / 1e9:,.1f} GB"
    )
    table = Table("operation", box=None, pad_edge=False)
    for name in ("latency", "rate"):
        table.add_column(name, justify="right")
    for axis in result["measured"]["axes"].values():
        for op, link in axis["ops"].items():
            table.add_row(
                op,
                f"{link['latency_seconds'] * 1e6:,.0f} µs",
                f"{link['bytes_per_second'] / 1e9:,.2f} GB/s sent",
            )
    is_local = out == probe_path()
    return Group(
        "\n".join(lines),
        table,
        *_parts(result, "keeping", _keeping),
        *_parts(result, "host", _products),
        f"written to {out}" + (": what cluster 'local' means" if is_local else ""),
    )


def _parts(
    result: Json, key: str, show: Callable[[Json], list[RenderableType]]
) -> list[RenderableType]:
    """One part of a probe as `show` draws it; nothing where that was not measured."""
    return show(result[key]) if key in result else []


def _keeping(found: Json) -> list[RenderableType]:
    """The line of what keeping a run's state takes."""
    parts = [f"copied at {found['copy_bytes_per_second'] / 1e9:,.2f} GB/s a rank"]
    if "write_bytes_per_second" in found:
        parts.append(f"written at {found['write_bytes_per_second'] / 1e9:,.2f} GB/s in all")
    parts.append(f"a rank joins in {found['start_seconds'] * 1e3:,.0f} ms")
    if "recovery_seconds" in found:
        parts.append(f"a lost one is replaced in {found['recovery_seconds']:.1f} s")
    return [f"state           {', '.join(parts)}"]


def _products(host: Json) -> list[RenderableType]:
    """The table of products of a processor, under a line that says what its numbers are."""
    from plait.cli.probe_products import product_view

    found = table_of_probe(host)
    if not found.ratios:
        return ["\nfloat32 products: torch's own, as the machine was busy; run plait probe again"]
    title = "\nfloat32 products: the library, and seconds of oneDNN over seconds of torch's own"
    return [title, product_view(found)]
