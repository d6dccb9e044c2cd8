"""The parts of the cost model held against measurements of parts: products, attention, collectives.

    python -m benchmarks.planner.parts

`data/measured_parts.csv` is a half of the public kernel measurements of ai-dynamo/aiconfigurator
(Apache-2.0, commit 095f58a: gemm_perf, context_attention_perf, nccl_perf) as far as they were at
hand. Columns `a` to `e` are (ranks, bytes), (m, n, k) and (batch, length, heads, heads of keys,
width of a head). Attention is the forward of causal kernels tuned for the device.

`data/collectives_between_nodes.csv` has nccl-tests (float32, out of place) as clouds and their
users print them in guides, and those of two clusters over 2 to 64 nodes. One more log is left out:
it takes twice the time of another on the same kind of nodes. So is one of devices whose port hangs
on another bus.

`data/reserved_memory.csv` has a line a run of the logs of Megatron-LM and its forks
(`report_memory`): what lives between steps, the peak that lives, and the peak that is reserved.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.machine import announce
from benchmarks.planner.clusters import NETWORKS
from benchmarks.planner.validate import error
from plait.cluster import Cluster
from plait.cluster.presets import PRESETS
from plait.predict.cost.machines import machine_of
from plait.predict.cost.memory.rules import DeviceMemory
from plait.predict.cost.model.operations import Attention
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.groups import Group, group
from plait.predict.cost.time.kernels import Setting, attention_seconds, gemm_seconds
from plait.predict.cost.time.machine import Machine

DATA = Path(__file__).parent / "data" / "measured_parts.csv"
BETWEEN_NODES = Path(__file__).parent / "data" / "collectives_between_nodes.csv"
RESERVED = Path(__file__).parent / "data" / "reserved_memory.csv"
SMALL = 1 << 20
"""Bytes below which a collective is latency."""

Row = dict[str, str]
Part = tuple[str, str, float]
"""The part, the device, and the relative error of its predicted time."""


def numbers(row: Row) -> list[int]:
    """The dimensions of a row."""
    return [int(row[name]) for name in "abcde" if row[name]]


def product(machine: Machine, row: Row) -> tuple[str, float]:
    """A matrix product."""
    m, n, k = numbers(row)
    seconds = gemm_seconds(Setting(machine, Sharding()), m, n, k)
    return ("products, large" if 2.0 * m * n * k > 1e11 else "products, small"), seconds


def attention(machine: Machine, row: Row) -> tuple[str, float]:
    """The forward of a fused attention."""
    batch, length, heads, kv_heads, width = numbers(row)
    op = Attention("attention", heads, kv_heads, width, width, True, kernel="tuned")
    setting = Setting(machine, Sharding(seq_len=length, samples=batch))
    seconds, _ = attention_seconds(op, setting)
    return ("attention, long" if length >= 4096 else "attention, short"), seconds


def collective(machine: Machine, row: Row) -> tuple[str, float]:
    """A collective inside a node."""
    ranks, payload = numbers(row)
    seconds = machine.collective_seconds(
        row["what"], payload, group(ranks, 1, machine.devices_per_node)
    )
    size = "small" if payload < SMALL else "large"
    return f"collectives, {size}", seconds


PARTS: dict[str, Callable[[Machine, Row], tuple[str, float]]] = {
    "product": product,
    "attention": attention,
    "collective": collective,
}


@cache
def networked(device: str, network: str, gbps_per_device: str) -> Machine:
    """Nodes of a device behind a network of this rate, in Gbit/s for each device."""
    cluster = Cluster.parse(device)
    bandwidth = float(gbps_per_device) * 1e9 / 8
    link = replace(cluster.network, bandwidth=bandwidth, **NETWORKS.get(network, {}))
    return machine_of(replace(cluster, network=link))


def between_nodes() -> Iterator[Part]:
    """Every measured collective over nodes."""
    with BETWEEN_NODES.open(newline="") as file:
        for row in csv.DictReader(file):
            machine = networked(row["device"], row["network"], row["gbps_per_device"])
            ranks, payload = int(row["ranks"]), int(row["payload_bytes"])
            nodes = int(row["nodes"])
            members = Group(ranks, ranks // nodes)
            seconds = machine.collective_seconds(row["collective"], payload, members)
            size = "small" if payload < SMALL else "large"
            part = f"between nodes, {size}" if nodes == 2 else f"4 to 64 nodes, {row['collective']}"
            measured = float(row["microseconds"]) * 1e-6
            yield part, row["device"], error(seconds, measured)


def errors() -> Iterator[Part]:
    """Every measured part of a device that has a preset."""
    yield from between_nodes()
    with DATA.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["device"] in PRESETS]
    machines = {name: machine_of(Cluster.parse(name)) for name in {row["device"] for row in rows}}
    for row in rows:
        name, seconds = PARTS[row["part"]](machines[row["device"]], row)
        yield name, row["device"], error(seconds, float(row["latency_ms"]) * 1e-3)


def medians() -> dict[str, tuple[int, float, float]]:
    """Rows, median of the signed error, and median of its size, by part and device."""
    found: dict[str, list[float]] = {}
    for name, device, one in errors():
        found.setdefault(name, []).append(one)
        found.setdefault(f"{name} {device}", []).append(one)
    return {
        name: (len(ones), statistics.median(ones), statistics.median(map(abs, ones)))
        for name, ones in sorted(found.items())
    }


def reserved_beyond() -> list[float]:
    """What each run's allocator reserves beyond its peak, of what a step adds to what lives."""
    with RESERVED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        lives, peak, reserved = (
            float(row[f"{name}_mb"]) for name in ("allocated", "max_allocated", "max_reserved")
        )
        found.append((reserved - peak) / (peak - lives))
    return sorted(found)


def main() -> None:
    announce()
    print(f"{'part':32} {'rows':>5} {'bias':>8} {'median':>8}")
    for name, (count, bias, size) in medians().items():
        print(f"{name:32} {count:5} {bias:8.1%} {size:8.1%}")
    beyond = reserved_beyond()
    low, middle, high = statistics.quantiles(beyond, n=4)
    print(f"reserved beyond the peak, of activations: {middle:.2f} [{low:.2f}, {high:.2f}]")
    print(f"counted: {DeviceMemory.fragmentation:.2f}")


if __name__ == "__main__":
    main()
