"""The page: groups of systems, run one after another within a time, as Markdown and as JSON."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks.machine import machine_line
from benchmarks.page.measure import (
    Footprint,
    Group,
    Taken,
    base_of,
    measure_footprint,
    measure_steps,
)
from benchmarks.page.systems import (
    CASES,
    FOOTPRINT_CASES,
    FSDP2_WHOLE,
    LINK_CASES,
    counterpart,
    micro_batches,
    one_thread,
    parts,
)
from benchmarks.spread import quartiles
from plait.cache_folder import cache_folder
from plait.cluster.products import ProductTable
from plait.engine.choosing import table_here
from plait.errors import RankFailed
from plait.launcher import launch

FOOTPRINTS = (
    *("torch DDP", FSDP2_WHOLE, "torch FSDP2", "torch DTensor", "torch 1F1B", "torch ZBV"),
    *(
        "dp2",
        "dp2:ring",
        "dp2:zero1",
        "dp2:zero2",
        "dp2:zero3",
        "tp2",
        "pp2:1f1b mb{m}",
        "pp2:zbv mb{m}",
    ),
)
PART_OF_FOOTPRINTS = 0.25
PART_OF_MEMORY = 0.5
START_SECONDS = 3.0
HEAD = "| system | step ms | / DDP [quartiles] | / torch's same schedule | CPU s a step |"


@dataclass(frozen=True)
class Row:
    """A system of a group: median seconds, and quartiles of its ratio to DDP round by round."""

    case: str
    size: int
    system: str
    seconds: float
    ratio: tuple[float, float, float]
    to_counterpart: float | None
    processor_seconds: float
    """Of all ranks together, a step."""
    rounds: int


def groups(
    sizes: Sequence[int], families: Sequence[str], seconds: float, table: ProductTable
) -> list[Group]:
    """The groups of the page, with equal parts of the time for each.

    Systems of a group are alive together, so a group has as many as half of the memory holds.
    """
    memory_bytes = psutil.virtual_memory().total * PART_OF_MEMORY
    found = []
    for size in sizes:
        for case in CASES:
            for family in families:
                for together in parts(family, size, CASES[case], table, memory_bytes):
                    found.append(Group(case, family, size, tuple(together), 0.0))
    return [replace(group, limit_seconds=seconds / len(found)) for group in found]


def run(group: Group, table: ProductTable) -> tuple[list[Row], dict[str, str]]:
    """The rows of one group, and what failed."""
    try:
        ranks = launch(measure_steps, group, table, nproc=group.size)
    except RankFailed as error:
        return [], {", ".join(group.systems): str(error)}
    return rows(group, ranks), ranks[0].failed


def rows(group: Group, ranks: Sequence[Taken]) -> list[Row]:
    """From what all ranks measured."""
    seconds = ranks[0].seconds
    base = seconds[base_of(group)]
    found = []
    for name, own in seconds.items():
        ratios = [mine / other for mine, other in zip(own, base, strict=True)]
        low, middle, high = quartiles(ratios)
        peer = seconds.get(counterpart(name) or "")
        to_peer = None
        if peer is not None:
            to_peer = median(mine / other for mine, other in zip(own, peer, strict=True))
        used = sum(median(rank.processor[name]) for rank in ranks)
        found.append(
            Row(
                group.case,
                group.size,
                name,
                median(own),
                (low, middle, high),
                to_peer,
                used,
                len(own),
            )
        )
    return found


def text(found: Sequence[Row]) -> str:
    """The table of one group."""
    first = found[0]
    case = LINK_CASES[first.case]
    lines = [f"\n### {case.why}, vocabulary {case.vocab_size}; {first.size} ranks\n", HEAD]
    lines.append("|---|---|---|---|---|")
    for row in found:
        low, middle, high = row.ratio
        to_peer = "" if row.to_counterpart is None else f"{row.to_counterpart:.3f}"
        lines.append(
            f"| {row.system.replace(' | ', ', ')} | {row.seconds * 1e3:.1f} "
            f"| {middle:.3f} [{low:.3f}, {high:.3f}] | {to_peer} | {row.processor_seconds:.3f} |"
        )
    lines.append(f"\n{first.rounds} rounds, interleaved.")
    return "\n".join(lines)


def footprint(case: str, name: str, table: ProductTable) -> Footprint:
    """Memory and bytes of a system on 2 ranks of its own."""
    system = name if name.startswith("torch") else f"{name} | shared memory"
    ranks = launch(measure_footprint, case, system, 2, table, nproc=2)
    fullest = max(ranks, key=lambda one: one.peak_bytes)
    sent = [one.sent_bytes for one in ranks if one.sent_bytes is not None]
    resident = max(one.resident_bytes for one in ranks)
    return Footprint(fullest.peak_bytes, resident, max(sent) if sent else None)


def footprint_head(case: str) -> str:
    """The head of a table of memory and bytes."""
    what = FOOTPRINT_CASES[case]
    lines = [
        f"\n### Memory and bytes, {what.why}, vocabulary {what.vocab_size}; 2 ranks\n",
        "| system | peak MB above `import torch`, shared pages in shares | resident MB | MB sent |",
        "|---|---|---|---|",
    ]
    return "\n".join(lines)


def footprint_row(name: str, one: Footprint) -> str:
    """A row of it."""
    sent = "" if one.sent_bytes is None else f"{one.sent_bytes / 1e6:.2f}"
    return f"| {name} | {one.peak_bytes / 1e6:.0f} | {one.resident_bytes / 1e6:.0f} | {sent} |"


def measured_footprints(table: ProductTable) -> dict[str, dict[str, Footprint]]:
    """Memory and bytes of every case that has them, printed as they come."""
    taken: dict[str, dict[str, Footprint]] = {}
    for case, what in FOOTPRINT_CASES.items():
        print(footprint_head(case), flush=True)
        taken[case] = {}
        for written in FOOTPRINTS:
            name = written.format(m=micro_batches(what))
            taken[case][name] = footprint(case, name, table)
            print(footprint_row(name, taken[case][name]), flush=True)
    return taken


def make_memory_page() -> None:
    """Print memory and bytes alone: other work beside them does not change them."""
    one_thread()
    print(f"{machine_line()}; one thread a rank")
    measured_footprints(table_here(cache_folder()))


def make_page(
    sizes: Sequence[int],
    families: Sequence[str],
    seconds: float,
    out: Path | None,
    *,
    with_memory: bool = True,
) -> list[Row]:
    """Print the page as it comes about, and write its rows as JSON.

    A group's time is an equal part of what is left, so that starting ranks counts too.
    """
    began = time.monotonic()
    one_thread()
    table = table_here(cache_folder())
    print(f"{machine_line()}; Python {platform.python_version()}, {platform.platform()}")
    print(f"torch: {torch.__config__.show().splitlines()[1].strip()}; one thread a rank")
    print("sockets, shared memory: with torch's product; as it comes: products as measured here")
    found: list[Row] = []
    for_times = seconds * (1 - PART_OF_FOOTPRINTS) if with_memory else seconds
    waiting = groups(sizes, families, for_times, table)
    for index, group in enumerate(waiting):
        left = for_times - (time.monotonic() - began)
        limit = max(left, 0.0) / (len(waiting) - index)
        own, failed = run(replace(group, limit_seconds=limit - START_SECONDS), table)
        if own:
            print(text(own), flush=True)
        for name, why in failed.items():
            print(f"{name} failed: {why}", flush=True)
        found += own
    taken = measured_footprints(table) if with_memory else {}
    if out is not None:
        answer = {
            "machine": machine_line(),
            "rows": [asdict(row) for row in found],
            "footprints": {
                case: {name: asdict(one) for name, one in systems.items()}
                for case, systems in taken.items()
            },
        }
        out.write_text(json.dumps(answer, indent=1) + "\n")
    return found
