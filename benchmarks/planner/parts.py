"""The parts of the cost model held against measurements of parts: products, attention, collectives.

    python -m benchmarks.planner.parts

`data/measured_parts.csv` is a half of the public kernel measurements of ai-dynamo/aiconfigurator
(Apache-2.0, commit 095f58a: gemm_perf, context_attention_perf, nccl_perf) as far as they were at
hand. Columns `a` to `e` are (ranks, bytes), (m, n, k) and (batch, length, heads, heads of keys,
width of a head). Attention is the forward of causal kernels tuned for the device.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.machine import announce
from benchmarks.planner.validate import error
from plait.cluster import Cluster
from plait.cluster.presets import PRESETS
from plait.predict.cost.machines import machine_of
from plait.predict.cost.model.operations import Attention
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.groups import group
from plait.predict.cost.time.kernels import Setting, attention_seconds, gemm_seconds
from plait.predict.cost.time.machine import Machine

DATA = Path(__file__).parent / "data" / "measured_parts.csv"
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


def errors() -> Iterator[Part]:
    """Every measured part of a device that has a preset."""
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


def main() -> None:
    announce()
    print(f"{'part':32} {'rows':>5} {'bias':>8} {'median':>8}")
    for name, (count, bias, size) in medians().items():
        print(f"{name:32} {count:5} {bias:8.1%} {size:8.1%}")


if __name__ == "__main__":
    main()
