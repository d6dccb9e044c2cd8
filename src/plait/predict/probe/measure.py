"""The measuring of this machine, by ranks that run at once, and the file that keeps the numbers.

A world of torchrun is measured by its own ranks. Otherwise ranks are started for it, also more than
there are cores. A processor's cost model must know how ranks share these.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cache_folder import cache_folder
from plait.cluster import Cluster
from plait.cluster.cpu_profile import MEETINGS, VERSION
from plait.cluster.products import ProductTable, processor_name
from plait.launcher import joined_world, launch
from plait.launcher.main_process import is_main_process, say
from plait.launcher.patience import AGAIN_SECONDS, telling
from plait.predict.probe.keeping import keeping
from plait.predict.probe.quiet import quietest
from plait.systems import own_cores
from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.comm import World
    from plait.predict.cost.time.machine import Machine

PARTS = ("engine", "blocks", "seconds")
LINK_SIZES_BYTES = (1 << 12, 1 << 17, 1 << 21)
PRECISIONS = {"float32": "float32", "bfloat16": "bf16", "float64": "float64"}
CROWDED = (2, 4)
"""Ranks per core with which links, and losses of ranks that meet, are measured as well."""
MOST_RANKS = 16


def measure_here(
    out: Path | None, num_ranks: int | None = None, *, quick: bool = False, remeasure: bool = False
) -> dict[str, object]:
    """Measure this machine and write the numbers at once, so that no reader meets half a file.
    Without `out` nothing is written.

    `quick` leaves out how more ranks than cores share these. Estimates of such plans then draw on
    the losses of fewer ranks. `remeasure` measures the table of products, and does not read it.
    """
    num_ranks = num_ranks or num_devices()
    noun = "rank" if num_ranks == 1 else "ranks"
    say(f"plait probe: measuring this machine, {num_ranks} {noun}, some seconds")
    shared = joined_world() is None  # else other ranks cannot be started
    if shared:
        with telling("probe", "measuring this machine", AGAIN_SECONDS):
            result, others = quietest(lambda: _measured(num_ranks, quick, remeasure), say)
        result["others_share"] = others
        result["keeping"] = keeping(num_ranks, Path.cwd())
    else:
        result = summary(launch(_measure, num_ranks, shared, remeasure, nproc=num_ranks)[0])
    if out is None:
        return result
    if is_main_process() or not out.exists():  # on another host of a world it is measured as well
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f"{out.name}.{os.getpid()}.part")
        part.write_text(json.dumps(result, indent=2) + "\n")
        part.replace(out)
    return result


def _measured(num_ranks: int, quick: bool, remeasure: bool) -> dict[str, object]:
    """The contents of a probe file, from ranks that are started for it."""
    measured = launch(_measure, num_ranks, True, remeasure, nproc=num_ranks)
    result = summary(measured[0])
    if result["is_cpu"]:
        result["host"] = _host(measured, num_ranks, quick)
    return result


def _measure(num_ranks: int, shared: bool, remeasure: bool) -> JsonObject:
    """The measurements of one rank, while all ranks are at work.

    `shared` adds the numbers of a processor's cost model. `remeasure` measures the table of
    products whether or not one is saved.
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
    measurements: JsonObject = {}
    if not on_gpu and shared:
        first = table_here(cache_folder(), remeasure=remeasure) if world.rank == 0 else None
        table = world.axis("world").gather_objects(first)[0]
        measurements["own"] = _operation_seconds(world)
        measurements["own"]["products"] = table.as_dict()
        measurements["own"]["machine"] = str(this_machine())
        world.barrier()
        measurements["met"] = _met(world, table)
        measurements["met"]["steps"][ALONE] = shortest_step(ALONE, table)
    measured = probe(world) | measurements
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


def _operation_seconds(world: World) -> dict[str, JsonObject]:
    """Seconds of single operations: each rank measures a part of them, all ranks at once."""
    from plait.predict.probe.engine import OTHER_FAMILIES, block_seconds, engine_seconds
    from plait.predict.probe.operations import OPERATIONS

    by_part: dict[str, JsonObject] = {part: {} for part in PARTS}
    if world.rank == 0:
        by_part["engine"] = engine_seconds()
        by_part["blocks"] = by_part["engine"].pop("blocks")
    if world.rank == world.size - 1:
        by_part["blocks"] |= block_seconds(OTHER_FAMILIES)
    for index, measure in enumerate(OPERATIONS):
        if (index + 1) % world.size == world.rank:
            by_part["seconds"] |= measure()
    return by_part


def _host(measured: list[JsonObject], num_ranks: int, quick: bool) -> JsonObject:
    """The numbers of a processor's cost model beside a cluster's: see `plait.cluster.Host`."""
    from plait.parallel.context.ring_schedule import KEYS_PER_STEP
    from plait.predict.cost.machines import machine_of
    from plait.predict.probe.meetings import ALONE, idle, losses, stretch

    table = ProductTable.from_dict(measured[0]["own"].pop("products"))
    by_size = {num_ranks: [one["met"] for one in measured]}
    crowded = (
        ()
        if quick
        else tuple(num_ranks * times for times in CROWDED if num_ranks * times <= MOST_RANKS)
    )
    for size in {*crowded, 2} - {num_ranks}:
        by_size[size] = launch(_meet, size, table, nproc=size)
    engine, blocks, seconds = (_merged(measured, part) for part in PARTS)
    host: JsonObject = {
        "version": VERSION,
        "seconds": seconds,
        "engine": engine
        | {"stretch": 1.0, "idle": 1.0, "blocks": blocks}
        | {name: {} for name in MEETINGS},
        "links": {
            str(size): _fits(ranks[0]["links"])
            for size, ranks in sorted(by_size.items())
            if size > 1
        },
        "rule": {"met_at_once": KEYS_PER_STEP},
        "machine": measured[0]["own"].pop("machine"),
    }
    steps = {}
    for ranks in by_size.values():
        for text in ranks[0]["steps"]:
            steps[text] = [one["steps"][text] for one in ranks]
    works = {text: [step.work for step in ranks] for text, ranks in steps.items()}

    def machine() -> Machine:
        """The machine of the numbers that are known so far."""
        whole = {**host, "products": table.as_dict()}
        return machine_of(Cluster.local({**summary(measured[0]), "host": whole}))

    host["engine"]["stretch"] = stretch(works.pop(ALONE), machine())
    host["engine"]["idle"] = idle({text: steps[text] for text in works}, num_ranks)
    host["engine"] |= losses(works, machine())
    return host


def _merged(measured: list[JsonObject], part: str) -> JsonObject:
    """The numbers of one part from all ranks, each of which has measured others."""
    merged: JsonObject = {}
    for one in measured:
        merged |= one["own"][part]
    return merged


def _fits(axes: JsonObject) -> dict[str, list[float]]:
    ops = next(iter(axes.values()))["ops"]
    return {op: [link["latency_seconds"], link["bytes_per_second"]] for op, link in ops.items()}


def _meet(num_ranks: int, table: ProductTable) -> dict[str, object]:
    """Seconds of one rank with so many others: in the blocks of plans, and in collectives alone."""
    from plait import comm
    from plait.mesh import Mesh

    world = comm.init(Mesh(dp=num_ranks))
    found = _met(world, table)
    world.close()
    return found


def _met(world: World, table: ProductTable) -> JsonObject:
    from plait.comm.probing import probe_links
    from plait.predict.probe.meetings import plans_of, shortest_step

    steps = {text: shortest_step(text, table) for text in plans_of(world.size)}
    return {"steps": steps, "links": probe_links(world, sizes_bytes=LINK_SIZES_BYTES, work=True)}


def num_devices() -> int:
    """The GPUs of this machine, or the cores that this process may use."""
    import torch

    return torch.cuda.device_count() or len(own_cores())


def summary(measured: JsonObject) -> JsonObject:
    """The numbers that make a cluster (SI units, for each device), with the raw ones in `measured`.

    The link's rate is that of an all-reduce, its latency that of a small message. A single device
    has no link, and gets its memory's rate.
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
