"""Measure this machine: matrix rate, memory bandwidth, and latency and bandwidth of the links of
each axis.

A plain dictionary comes out, so that a cluster description can be made of it without anything of
this module. All ranks call it together; it takes seconds. Every time is the shortest of repeated
runs after a warm-up: whatever else runs on a machine only adds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from plait.comm.axis import Axis
from plait.comm.transitions import bytes_sent
from plait.comm.world import World
from plait.mesh import AxisName
from plait.values import JsonObject

SIZES_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 23)
ROW_BYTES = 24 << 20
MOST_COPIES = 16
"""Different buffers that an operation takes in turn, since a step seldom finds its buffer in a
cache.
"""
OPS = ("all_reduce", "all_gather", "reduce_scatter", "send")
STAGED = ("staged_all_reduce", "staged_all_gather", "staged_reduce_scatter")
"""Operations on tensors that peers cannot read in place, as inside a block."""


def probe(world: World, axes: Iterable[AxisName] = ("world",)) -> JsonObject:
    """Measure the device of this rank and the given axes; the times of axes are those of the
    slowest rank. Collective.

    Returns:
        `{"device": {"kind", "threads", "matmul_flops_per_second": {dtype: x},
        "memory_bytes_per_second"}, "axes": {name: {"size", "ops": {op: {"latency_seconds",
        "bytes_per_second", "points": [[bytes_sent, seconds]]}}}}}`. `bytes_sent` are those of one
        rank, so `latency + bytes_sent / bytes_per_second` predicts an operation.
    """
    return {"device": probe_device(world.device), "axes": probe_links(world, axes, SIZES_BYTES)}


def probe_links(
    world: World,
    axes: Iterable[AxisName] = ("world",),
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    *,
    work: bool = False,
) -> JsonObject:
    """The `axes` of `probe`, with messages of these sizes. With `work`, the seconds that a rank's
    processor takes, on average, instead of those that pass, and `STAGED` besides. Collective.
    """
    counted = world.ledger.copy()
    lines = [world.axis(name) for name in axes]
    links = {
        axis.name: {"size": axis.size, "ops": _links(axis, world.device, sizes_bytes, work)}
        for axis in lines
        if axis.size > 1
    }
    world.ledger.restore(counted)  # what is measured here is no traffic of the run
    return links


def probe_device(device: torch.device) -> JsonObject:
    """Matrix rate (multiplications and additions both counted) by dtype, and memory bandwidth (read
    and written).
    """
    dtypes = (
        (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32, torch.float64)
    )
    n, numel = (4096, 1 << 28) if device.type == "cuda" else (512, 1 << 23)
    rates = {}
    for dtype in dtypes:
        a, b, c = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(3))
        seconds = _least_seconds(partial(torch.mm, a, b, out=c), 9, device)
        rates[str(dtype).removeprefix("torch.")] = 2 * n**3 / seconds
    source, target = (torch.ones(numel, device=device) for _ in range(2))
    seconds = _least_seconds(lambda: target.copy_(source), 9, device)
    return {
        "kind": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "matmul_flops_per_second": rates,
        "memory_bytes_per_second": 2 * numel * source.element_size() / seconds,
    }


def _links(axis: Axis, device: torch.device, sizes_bytes: Sequence[int], work: bool) -> JsonObject:
    """Each operation at each size."""
    result = {}
    for op in (*OPS, *STAGED) if work else OPS:
        points = []
        for size_bytes in sizes_bytes:
            numel = size_bytes // 4 // axis.size * axis.size
            if not numel:
                continue
            repeats = 10 if size_bytes <= 1 << 18 else 5
            times = _seconds(
                _call(axis, op, numel, device),
                repeats,
                device,
                time.process_time if work else time.perf_counter,
            )
            found = axis.gather_objects(statistics.median(times) if work else min(times))
            pair = 2 if op == "send" else axis.size  # the others rest
            seconds = statistics.fmean(found[:pair]) if work else max(found)
            points.append(
                (
                    bytes_sent(op.removeprefix("staged_"), numel * 4, axis.size),
                    seconds / 2 if op == "send" else seconds,
                )
            )
        latency, rate = fit(points)
        result[op] = {
            "latency_seconds": latency,
            "bytes_per_second": rate,
            "points": [list(point) for point in points],
        }
    return result


def _call(axis: Axis, op: str, numel: int, device: torch.device) -> Callable[[], object]:
    copies = max(1, min(MOST_COPIES, ROW_BYTES // (4 * numel)))
    staged = op in STAGED
    memory = (
        torch.empty(copies * numel, device=device)
        if staged
        else axis.empty(copies * numel, torch.float32, device)
    )
    row = itertools.cycle(memory.zero_().view(copies, numel))

    def own(full: torch.Tensor) -> torch.Tensor:
        part = full.view(axis.size, -1)[axis.rank]
        return part.clone() if staged else part

    op = op.removeprefix("staged_")
    if op == "all_reduce":
        return lambda: axis.all_reduce(next(row)).wait()
    if op == "all_gather":
        return lambda: axis.all_gather(full := next(row), own(full)).wait()
    if op == "reduce_scatter":
        return lambda: axis.reduce_scatter(own(full := next(row)), full).wait()

    def there_and_back() -> None:
        """Coordinates 0 and 1; the others rest."""
        full = next(row)
        if axis.rank == 0:
            axis.send(full, 1).wait()
            axis.receive(full, 1).wait()
        elif axis.rank == 1:
            axis.receive(full, 0).wait()
            axis.send(full, 0).wait()

    return there_and_back


def _least_seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    return min(_seconds(call, repeats, device, time.perf_counter))


def _seconds(
    call: Callable[[], object], repeats: int, device: torch.device, clock: Callable[[], float]
) -> list[float]:
    """All ranks repeat equally often, so that collectives match."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(repeats + 2):
        synchronize()
        start = clock()
        call()
        synchronize()
        times.append(clock() - start)
    return times[2:]


def fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(latency, bytes per second) of `seconds = latency + bytes / rate`, least squares of the
    relative errors.

    Relative, because otherwise the largest message alone would decide. A negative latency becomes
    zero.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_bytes = sum(w * b for w, (b, _) in zip(weights, points, strict=True)) / total
    mean_seconds = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    both = [
        (w, b - mean_bytes, s - mean_seconds) for w, (b, s) in zip(weights, points, strict=True)
    ]
    spread = sum(w * b * b for w, b, _ in both)
    slope = sum(w * b * s for w, b, s in both) / spread if spread else 0.0
    if slope <= 0:  # noise: the largest message tells the rate
        num_bytes, seconds = max(points)
        return 0.0, num_bytes / seconds
    latency = mean_seconds - slope * mean_bytes
    return (latency, 1 / slope) if latency > 0 else (0.0, 1 / slope)
