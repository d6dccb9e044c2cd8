"""The kernels of three steps: the longest, how long the device was busy, and where it waited."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.gpu.measuring import wait
from benchmarks.gpu.record import Record, say

STEPS = 3
LONGEST = 25
GAPS = 15
Span = tuple[float, float, str]
"""Start and end in microseconds, and the kernel's name."""


def profile(name: str, step: Callable[[], Any], device: str, record: Record) -> None:
    """Write the profile of a system's steps into the folder of the results."""
    wait(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait(device)
    plain = time.perf_counter() - began
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch_profile(activities=activities) as profiler:
        step()
        wait(device)
        began = time.perf_counter()
        for _ in range(STEPS - 1):
            step()
        wait(device)
        profiled = time.perf_counter() - began
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == kind
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Optimizer.", "##", "Torch-Compiled"))
    )
    lines = [
        f"{name}: {STEPS} steps on {torch.cuda.get_device_name(0) if device == 'cuda' else 'cpu'}",
        f"wall ms a step without the profiler {plain / STEPS * 1e3:.3f}, "
        f"with it {profiled / (STEPS - 1) * 1e3:.3f}",
        *_busy(spans),
        *_kernels(spans),
        *_waits(spans),
        "",
        "host operations by their own time:",
        profiler.key_averages().table(
            sort_by="self_cpu_time_total", row_limit=LONGEST, max_name_column_width=60
        ),
    ]
    path = record.folder / f"profile-{re.sub('[^a-z0-9]+', '-', name.lower())}.txt"
    path.write_text("\n".join(lines) + "\n")
    say(f"profile of {name}: {path.name}; {lines[1]}; {lines[2]}")


def _busy(spans: list[Span]) -> list[str]:
    busy = until = 0.0
    for start, end, _ in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - spans[0][0] if spans else 0.0
    return [
        f"device busy ms a step {busy / STEPS / 1e3:.3f} of {whole / STEPS / 1e3:.3f} between the "
        f"first kernel and the last, {len(spans) / STEPS:.0f} kernels a step"
    ]


def _kernels(spans: list[Span]) -> list[str]:
    """The longest kernels, and every copy."""
    total: dict[str, float] = defaultdict(float)
    times: dict[str, int] = defaultdict(int)
    for start, end, kernel in spans:
        total[kernel] += end - start
        times[kernel] += 1
    ranked = sorted(total, key=lambda one: -total[one])
    copies = [one for one in ranked[LONGEST:] if one.startswith(("Memcpy", "Memset"))]
    lines = ["", "ms a step | times a step | kernel"]
    for kernel in ranked[:LONGEST] + copies:
        spent = total[kernel] / STEPS / 1e3
        lines.append(f"{spent:9.3f} | {times[kernel] / STEPS:7.1f} | {kernel[:160]}")
    return lines


def _waits(spans: list[Span]) -> list[str]:
    """The longest gaps of the device, with the kernels around them."""
    gaps = []
    until, last = (spans[0][1], spans[0][2]) if spans else (0.0, "")
    for start, end, kernel in spans[1:]:
        if start > until:
            gaps.append((start - until, last, kernel))
        if end > until:
            until, last = end, kernel
    lines = ["", "gap us | after | before"]
    for gap, before, after in sorted(gaps, reverse=True)[:GAPS]:
        lines.append(f"{gap:8.1f} | {before[:60]} | {after[:60]}")
    short = sum(gap for gap, _, _ in gaps)
    lines.append(f"all {len(gaps) / STEPS:.0f} gaps a step: {short / STEPS / 1e3:.3f} ms a step")
    return lines
