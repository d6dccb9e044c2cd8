"""Times and memory of steps and of single operations on one device."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.gpu.models import Subject
from benchmarks.gpu.steps import Steps

WARM = 3
GROUPS = 4
Build = Callable[[Subject, str], Steps]


@dataclass
class Measured:
    """One turn of a system."""

    build_seconds: float
    first_seconds: float
    """Of the first step: what the earlier compilation has not done."""
    step_seconds: list[float]
    """A step's, by group."""
    peak_bytes: int
    """From before the build to the last step."""
    steps_peak_bytes: int
    """Of the steps alone."""
    flops: float
    new_graphs: int
    """Graphs that this turn compiled: 0 where all were ready."""
    clocks: list[int] = field(default_factory=list)
    """MHz of the device after each group."""


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def clear(device: str) -> None:
    """Give back what is left over from an earlier turn."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    return int(counters["stats"]["unique_graphs"])


def clock() -> list[int]:
    """The device's clock in MHz, where the driver's library tells it."""
    try:
        return [torch.cuda.clock_rate()]
    except Exception:  # no such library: a number less
        return []


def take_turn(
    build: Build,
    subject: Subject,
    device: str,
    after: Callable[[Callable[[], Any]], None] | None = None,
) -> Measured:
    """Build, warm up, time groups of steps, and leave; `after` gets the step at the end."""
    clear(device)
    before = allocated(device)
    graphs_before = graphs()
    began = time.perf_counter()
    steps = build(subject, device)
    wait(device)
    built = time.perf_counter()
    try:
        steps.step()
        wait(device)
        first = time.perf_counter() - built
        build_peak = peak(device)
        for _ in range(WARM - 1):
            steps.step()
        wait(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, clocks = [], []
        for _ in range(GROUPS):
            start = time.perf_counter()
            for _ in range(subject.group):
                steps.step()
            wait(device)
            seconds.append((time.perf_counter() - start) / subject.group)
            clocks += clock() if device == "cuda" else []
        steps_peak = peak(device)
        new_graphs = graphs() - graphs_before
        if after is not None:
            after(steps.step)
    finally:
        steps.close()
    return Measured(
        build_seconds=built - began,
        first_seconds=first,
        step_seconds=seconds,
        peak_bytes=max(build_peak, steps_peak) - before,
        steps_peak_bytes=steps_peak - before,
        flops=steps.flops,
        new_graphs=new_graphs,
        clocks=clocks,
    )


def get_ready(builds: dict[str, Build], subject: Subject, device: str) -> dict[str, str]:
    """Compile the blocks of every system, on few layers; returns what that took, in words."""
    told = {}
    for name, build in builds.items():
        before, began = graphs(), time.perf_counter()
        counters["graph_break"].clear()
        steps = build(subject.shallow() if device == "cuda" else subject, device)
        try:
            for _ in range(2):
                steps.step()
            wait(device)
        finally:
            steps.close()
        del steps
        clear(device)
        seconds = time.perf_counter() - began
        breaks = sum(counters["graph_break"].values())
        told[name] = f"{graphs() - before} graphs, {breaks} breaks, {seconds:.0f} s"
    return told


def operation_seconds(call: Callable[[], Any], device: str, times: int = 15) -> float:
    """The median of an operation's seconds by the device's own clock, while it is kept at work."""
    for _ in range(3):
        call()
    if device != "cuda":
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return median(taken)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    pairs = pairwise(marks)
    return median(first.elapsed_time(last) for first, last in pairs) / 1e3


def loaded_seconds(call: Callable[[], Any], device: str) -> tuple[float, float]:
    """An operation's seconds after a pause, and after a third of a second of it alone."""
    call()
    wait(device)
    time.sleep(0.1 if device == "cuda" else 0.0)
    short = operation_seconds(call, device, 5)
    if device != "cuda":
        return short, short
    for _ in range(min(3000, max(5, round(0.3 / max(short, 1e-6))))):
        call()
    return short, operation_seconds(call, device)
