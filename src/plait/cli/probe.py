"""`plait probe`: measure this machine, so that `local` is a cluster like any other to `plan` and
`estimate`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli import common
from plait.cli.answer import Answer
from plait.cluster import DEFAULT_PROBE_PATH, Cluster, read_probe
from plait.cluster.host import MEETINGS, VERSION
from plait.cluster.products import MEASUREMENTS, ProductTable, processor_name, table_of_probe
from plait.errors import ClusterError, ConfigError
from plait.launcher import joined_world, launch
from plait.predict.probe.quiet import quietest, warning

if TYPE_CHECKING:
    from rich.console import RenderableType

    from plait.comm import Axis, World
    from plait.predict.cost.time.machine import Machine

PARTS = ("engine", "blocks", "seconds")
LINK_SIZES_BYTES = (1 << 12, 1 << 17, 1 << 21)
PRECISIONS = {"float32": "float32", "bfloat16": "bf16", "float64": "float64"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait probe`."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"where to write it (default: {DEFAULT_PROBE_PATH})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave out how more ranks than cores share these"
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks that measure together (default: GPUs, else cores)",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Measure with one rank a device, all at once, as training would use them. Errors:
    `ConfigError` for the file.
    """
    out = arguments.out if arguments.out is not None else DEFAULT_PROBE_PATH.expanduser()
    _check_writable(out)
    world = joined_world()
    num_ranks = arguments.nproc or (world.world_size if world else num_devices())
    result = measure_here(out, num_ranks, quick=arguments.quick, anew=True)
    return (
        Answer({"out": str(out), **result}, view(result, out)) if common.speaks() else Answer(None)
    )


def measure_here(
    out: Path, num_ranks: int | None = None, *, quick: bool = False, anew: bool = False
) -> dict[str, Any]:
    """Measure this machine and write what was found, in one go, so that nobody reads half a file.

    `quick` leaves out how more ranks than cores share these: estimates of such plans draw on what
    fewer ranks lose. `anew` measures the table of products again, which is otherwise taken as kept.
    """
    num_ranks = num_ranks or num_devices()
    common.say(
        f"plait probe: measuring this machine, {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}, some seconds"
    )
    shared = joined_world() is None  # else other ranks cannot be started
    if shared:
        result, others = quietest(lambda: _measured(num_ranks, quick, anew), common.say)
        result["others_share"] = others
    else:
        result = summary(launch(_measure, num_ranks, shared, anew, nproc=num_ranks)[0])
    if common.speaks() or not out.exists():  # on another host of a world it is measured as well
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f"{out.name}.{os.getpid()}.part")
        part.write_text(json.dumps(result, indent=2) + "\n")
        part.replace(out)
    return result


def _measured(num_ranks: int, quick: bool, anew: bool) -> dict[str, Any]:
    """The contents of a probe file, from ranks that are started for it."""
    measured = launch(_measure, num_ranks, True, anew, nproc=num_ranks)
    result = summary(measured[0])
    if result["is_cpu"]:
        result["host"] = _host(measured, num_ranks, quick)
    return result


def ensure_probe() -> None:
    """Measure this machine if nobody has: what cluster `local` means from then on.

    A world of torchrun could not measure how ranks share the cores of a processor; that is made up
    for here.
    """
    path = DEFAULT_PROBE_PATH.expanduser()
    probe = read_probe(path)
    if probe is None or (probe.get("is_cpu", True) and not is_complete(probe)):
        _check_writable(path)
        probe = measure_here(path)
    sentence = warning(probe)
    if sentence is not None:
        common.say(sentence)


def is_complete(probe: dict[str, Any]) -> bool:
    """Whether it holds what this version asks of a processor."""
    return is_usable(probe) and probe.get("host") is not None


def is_usable(probe: dict[str, Any]) -> bool:
    """Whether a cluster can be made of it."""
    try:
        Cluster.local(probe)
    except ClusterError:
        return False
    return True


def ensure_probe_together(meeting: Axis) -> None:
    """The same in a world that has begun: all ranks measure where one has no measurements that can
    be used. Collective.
    """
    path = DEFAULT_PROBE_PATH.expanduser()
    probe = read_probe(path)
    if any(meeting.gather_objects(probe is None or not is_usable(probe))):
        _check_writable(path)
        measure_here(path, meeting.size)


CROWDED = (2, 4)
"""How many times as many ranks as cores the links and what ranks lose when they meet are also
measured with.
"""
MOST_RANKS = 16


def _host(measured: list[dict[str, Any]], num_ranks: int, quick: bool) -> dict[str, Any]:
    """What a processor's cost model needs beside a cluster's numbers: see `plait.cluster.Host`."""
    from plait.parallel.context.rounds import MET_AT_ONCE
    from plait.predict.cost.time.machine import machine_of
    from plait.predict.probe.meetings import ALONE, idle, losses, stretch

    table = ProductTable.from_dict(measured[0]["own"].pop("products"))
    found = {num_ranks: [one["met"] for one in measured]}
    crowded = (
        ()
        if quick
        else tuple(num_ranks * times for times in CROWDED if num_ranks * times <= MOST_RANKS)
    )
    for size in {*crowded, 2} - {num_ranks}:
        found[size] = launch(_meet, size, table, nproc=size)
    engine, blocks, seconds = (
        {k: v for one in measured for k, v in one["own"][part].items()} for part in PARTS
    )
    host: dict[str, Any] = {
        "version": VERSION,
        "seconds": seconds,
        "engine": engine
        | {"stretch": 1.0, "idle": 1.0, "blocks": blocks}
        | {name: {} for name in MEETINGS},
        "links": {
            str(size): _fits(ranks[0]["links"]) for size, ranks in sorted(found.items()) if size > 1
        },
        "rule": {"met_at_once": MET_AT_ONCE},
        "machine": measured[0]["own"].pop("machine"),
    }
    steps = {
        text: [one["steps"][text] for one in ranks]
        for ranks in found.values()
        for text in ranks[0]["steps"]
    }
    works = {text: [step.work for step in ranks] for text, ranks in steps.items()}

    def machine() -> Machine:
        """As far as it is known."""
        whole = {**host, "products": table.as_dict()}
        return machine_of(Cluster.local({**summary(measured[0]), "host": whole}))

    host["engine"]["stretch"] = stretch(works.pop(ALONE), machine())
    host["engine"]["idle"] = idle({text: steps[text] for text in works}, num_ranks)
    host["engine"] |= losses(works, machine())
    return host


def _fits(axes: dict[str, Any]) -> dict[str, list[float]]:
    ops = next(iter(axes.values()))["ops"]
    return {op: [link["latency_seconds"], link["bytes_per_second"]] for op, link in ops.items()}


def _meet(num_ranks: int, table: ProductTable) -> dict[str, Any]:
    """What one rank takes to meet so many: in the blocks of plans, and in collectives alone."""
    from plait import comm
    from plait.mesh import Mesh

    world = comm.init(Mesh(dp=num_ranks))
    found = _met(world, table)
    world.close()
    return found


def _met(world: World, table: ProductTable) -> dict[str, Any]:
    from plait.comm.probing import probe_links
    from plait.predict.probe.meetings import plans_of, shortest_step

    steps = {text: shortest_step(text, table) for text in plans_of(world.size)}
    return {"steps": steps, "links": probe_links(world, sizes_bytes=LINK_SIZES_BYTES, work=True)}


def num_devices() -> int:
    """The GPUs of this machine, or the cores that this process may use."""
    import torch

    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """The numbers that make a cluster (SI units, of each device), with all that was measured under
    `measured`.

    The link's rate is that of an all-reduce, its latency that of a small message; a single device
    has no link, and gets what its memory does.
    """
    device = measured["device"]
    links = [axis["ops"] for axis in measured["axes"].values()]
    memory_rate = device["memory_bytes_per_second"]
    return {
        "name": measured["name"],
        "is_cpu": device["kind"] == "cpu",
        "num_devices": measured["num_devices"],
        "peak_flops": {
            PRECISIONS[dtype]: rate for dtype, rate in device["matmul_flops_per_second"].items()
        },
        "memory_bytes": measured["memory_bytes"],
        "memory_bandwidth": memory_rate,
        "link_bandwidth": links[0]["all_reduce"]["bytes_per_second"] if links else memory_rate,
        "link_latency_seconds": max(links[0]["send"]["latency_seconds"], 1e-9) if links else 1e-6,
        "measured": measured,
    }


def view(result: dict[str, Any], out: Path) -> RenderableType:
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
        f"memory          {result['memory_bandwidth'] / 1e9:,.1f} GB/s, {result['memory_bytes'] / 1e9:,.1f} GB"
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
    is_local = out == DEFAULT_PROBE_PATH.expanduser()
    return Group(
        "\n".join(lines),
        table,
        *_products(result),
        f"written to {out}" + (": what cluster 'local' means" if is_local else ""),
    )


def _products(result: dict[str, Any]) -> list[RenderableType]:
    """The table of products of a processor, under a line that says what its numbers are."""
    from plait.cli.probe_products import product_view

    host = result.get("host")
    if host is None:
        return []
    found = table_of_probe(host)
    if not found.ratios:
        return ["\nfloat32 products: torch's own, as the machine was busy; run plait probe again"]
    title = "\nfloat32 products: the library, and seconds of oneDNN over seconds of torch's own"
    return [title, product_view(found)]


def _measure(num_ranks: int, shared: bool, anew: bool) -> dict[str, Any]:
    """What one rank finds, in all of them together; `shared`: also what a processor's cost model
    needs. `anew`: the table of products is measured, whatever is kept.
    """
    import torch

    from plait import comm
    from plait.comm.probing import probe
    from plait.engine.choosing import table_here
    from plait.mesh import Mesh
    from plait.predict.probe.meetings import ALONE, shortest_step
    from plait.predict.probe.operations import product_rate
    from plait.products.measure import this_machine

    world = comm.init(Mesh(dp=num_ranks))
    on_gpu = world.device.type == "cuda"
    own: dict[str, Any] = {}
    if not on_gpu and shared:
        first = table_here(MEASUREMENTS, anew=anew) if world.rank == 0 else None
        table = world.axis("world").gather_objects(first)[0]
        own["own"] = _own_share(world)
        own["own"]["products"] = table.as_dict()
        own["own"]["machine"] = str(this_machine())
        world.barrier()
        own["met"] = _met(world, table)
        own["met"]["steps"][ALONE] = shortest_step(ALONE, table)
    measured = probe(world) | own
    if not on_gpu:
        rates = measured["device"]["matmul_flops_per_second"]
        rates["float32"] = max(rates["float32"], product_rate())
    name = torch.cuda.get_device_name(world.device) if on_gpu else processor_name()
    memory_bytes = (
        torch.cuda.get_device_properties(world.device).total_memory
        if on_gpu
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks
    )
    world.close()
    return {
        "name": name,
        "num_devices": num_ranks,
        "memory_bytes": memory_bytes,
        "at": time.time(),
        **measured,
    }


def _own_share(world: World) -> dict[str, dict[str, Any]]:
    """What a rank takes for itself: each rank measures some of it, while the others are at work on
    the rest.
    """
    from plait.predict.probe.engine import OTHER_FAMILIES, block_seconds, engine_seconds
    from plait.predict.probe.operations import OPERATIONS

    found: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    if world.rank == 0:
        found["engine"] = engine_seconds()
        found["blocks"] = found["engine"].pop("blocks")
    if world.rank == world.size - 1:
        found["blocks"] |= block_seconds(OTHER_FAMILIES)
    for index, measure in enumerate(OPERATIONS):
        if (index + 1) % world.size == world.rank:
            found["seconds"] |= measure()
    return found


def _check_writable(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    if not os.access(out if out.exists() else out.parent, os.W_OK) or out.is_dir():
        raise ConfigError(f"{out} cannot be written")
