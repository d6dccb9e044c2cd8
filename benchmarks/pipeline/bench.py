"""Step time and memory of pipelines: plait's schedules beside torch's; simulated beside measured
time of the same run.

    python -m benchmarks.pipeline.bench [--ranks 2] [--cases compute communication] [--rounds 9]
    [--only WORD ...] [--memory]
        [--product torch]

All systems live in the same ranks, one thread each, and take turns, one step each round; the tables
show medians and ratios taken round by round. Simulated is the schedule walked with costs that are
probed on each rank's stages alone, between the rounds (see `probe`), and with the updates, posts
and sends of the steps that warmed up: a walk for each round, the median. With --memory the peak of
each system is taken instead, in ranks of its own. With `--product torch` plait's layers multiply
with the library that torch's own take (see `plait.products`), so that only the pipelines differ.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import ChainMap, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from benchmarks.data_parallel.bench import PeakOfShares
from benchmarks.machine import announce
from benchmarks.pipeline.probe import Draw, others, probe, probe_messages
from benchmarks.pipeline.systems import (
    BASE,
    CASES,
    COUNTERPART,
    STREAMS,
    Case,
    schedule_of,
    systems,
)
from plait import comm
from plait.launcher import launch
from plait.mesh import Mesh
from plait.parallel.pipeline.actions import Schedule
from plait.parallel.pipeline.observed import Messages, observed_bubble, simulated_step
from plait.trace import Timeline

WARM = 3


@dataclass
class Taken:
    """What one rank measured: seconds of each round and traced steps by system, and what its stages
    cost alone.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    traces: dict[str, list[Timeline]] = field(default_factory=lambda: defaultdict(list))
    warm: dict[str, list[Timeline]] = field(default_factory=lambda: defaultdict(list))
    probed: dict[str, list[Draw]] = field(default_factory=lambda: defaultdict(list))
    messages: dict[str, list[Messages]] = field(default_factory=lambda: defaultdict(list))


def measure(case_name: str, names: Sequence[str], rounds: int, size: int, product: str) -> Taken:
    """Runs in every rank."""
    torch.set_num_threads(1)
    world = comm.init(Mesh(pp=size))
    steps: dict[str, Any] = {
        name: systems(size, product)[name](CASES[case_name], world) for name in names
    }
    taken = Taken()
    gc.disable()
    for round_index in range(rounds + WARM):
        for name, step in steps.items():
            world.barrier()
            began = time.perf_counter()
            result = step()
            world.barrier()
            seconds = time.perf_counter() - began
            if round_index >= WARM:
                taken.seconds[name].append(seconds)
            if name.startswith("plait"):
                (taken.traces if round_index >= WARM else taken.warm)[name].append(result.timeline)
            if name.startswith("plait") and name not in STREAMS and round_index >= WARM:
                world.begin_timeline(Timeline(enabled=False))  # that of the step has ended
                world.barrier()
                taken.probed[name].append(probe(step.engine, step.batch))
                taken.messages[name].append(probe_messages(world.axis("pp"), step.engine))
        gc.collect()
    return Taken(*(dict(vars(taken)[one.name]) for one in fields(Taken)))


@dataclass(frozen=True)
class Row:
    """A line of the table; what only plait's flush schedules have is None elsewhere."""

    name: str
    seconds: float
    to_base: float
    to_counterpart: float | None = None
    simulated_seconds: float | None = None
    bubble: float | None = None
    simulated_bubble: float | None = None

    def cells(self) -> str:
        error = (
            None if self.simulated_seconds is None else self.simulated_seconds / self.seconds - 1
        )
        cells = [
            self.name,
            f"{self.seconds * 1e3:.1f}",
            f"{self.to_base:.3f}",
            _cell(self.to_counterpart, ".3f"),
            _cell(None if self.simulated_seconds is None else self.simulated_seconds * 1e3, ".1f"),
            _cell(None if error is None else error * 100, "+.1f"),
            _cell(None if self.bubble is None else self.bubble * 100, ".1f"),
            _cell(None if self.simulated_bubble is None else self.simulated_bubble * 100, ".1f"),
        ]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| system | step ms | / DDP | / torch's own | simulated ms | error % | bubble % | simulated % |"
)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def rows(case: Case, size: int, names: Sequence[str], ranks: Sequence[Taken]) -> list[Row]:
    """From what all ranks measured in one run."""
    seconds = ranks[0].seconds

    def ratio(name: str, other: str) -> float:
        return statistics.median(
            own / base for own, base in zip(seconds[name], seconds[other], strict=True)
        )

    found = []
    for name in names:
        peer = COUNTERPART.get(name)
        row = Row(
            name,
            statistics.median(seconds[name]),
            ratio(name, BASE),
            ratio(name, peer) if peer in seconds else None,
        )
        if name in ranks[0].probed:
            steps = simulated_steps(schedule_of(name, size, case.num_micro_batches), name, ranks)
            traced = [
                Timeline.merge(steps)
                for steps in zip(*(rank.traces[name] for rank in ranks), strict=True)
            ]
            bubble, simulated = (
                statistics.median(observed_bubble(one) for one in some) for some in (traced, steps)
            )
            simulated_seconds = statistics.median(step.seconds for step in steps)
            row = Row(
                name,
                row.seconds,
                row.to_base,
                row.to_counterpart,
                simulated_seconds,
                bubble,
                simulated,
            )
        found.append(row)
    return found


def simulated_steps(schedule: Schedule, name: str, ranks: Sequence[Taken]) -> list[Timeline]:
    """The schedule walked with each round's draw of the times of its actions."""
    warm = others(
        [Timeline.merge(steps) for steps in zip(*(rank.warm[name] for rank in ranks), strict=True)]
    )
    probed = [one for rank in ranks for one in rank.messages[name]]
    messages = Messages(
        statistics.median(one.transfer_seconds for one in probed),
        statistics.median(one.taking_seconds for one in probed),
    )
    draws = zip(*(rank.probed[name] for rank in ranks), strict=True)
    return [simulated_step(schedule, warm, messages, dict(ChainMap(*draw))) for draw in draws]


def measure_memory(case_name: str, name: str, size: int, product: str) -> float:
    """Peak bytes of a rank beyond those before the model, pages shared with other ranks in
    shares.
    """
    torch.set_num_threads(1)
    world = comm.init(Mesh(pp=size))
    with PeakOfShares() as shares:
        step = systems(size, product)[name](CASES[case_name], world)
        for _ in range(4):
            step()
    return shares.peak_bytes


def memory_table(case: Case, size: int, names: Sequence[str], product: str) -> None:
    print(
        f"\n### {case.name}: peak MB of the fullest rank; {size} ranks, {case.num_micro_batches} "
        "micro-batches\n"
    )
    print("| system | peak MB | / torch's own |\n|---|---|---|")
    peaks: dict[str, float] = {}
    for name in names:
        peaks[name] = max(launch(measure_memory, case.name, name, size, product, nproc=size)) / 1e6
        peer = peaks.get(COUNTERPART.get(name, ""))
        print(
            f"| {name} | {peaks[name]:.1f} | "
            f"{_cell(None if peer is None else peaks[name] / peer, '.3f')} |",
            flush=True,
        )


def table(case: Case, size: int, rounds: int, names: Sequence[str], product: str) -> None:
    alone = [
        name for name in names if name in STREAMS
    ]  # a stream has messages under way between its steps
    found: list[Row] = []
    for group in [[name for name in names if name not in alone], *([BASE, name] for name in alone)]:
        ranks = launch(measure, case.name, group, rounds, size, product, nproc=size)
        found += [
            row
            for row in rows(case, size, group, ranks)
            if row.name not in {row.name for row in found}
        ]
    print(f"\n### {case.name}: {case.why}; {size} ranks, {case.num_micro_batches} micro-batches")
    print(f"\n{rounds} rounds; linear_product = {product}\n")
    print(f"{HEAD}\n{'|---' * HEAD.count(' | ')}|---|")
    for row in found:
        print(row.cells(), flush=True)
    summary(found)


def summary(found: Sequence[Row]) -> None:
    """The questions of the table, answered by it."""
    theirs = [row for row in found if row.name.startswith("torch") and row.name != BASE]
    ours = [row for row in found if row.name.startswith("plait") and row.name not in STREAMS]
    errors = [
        abs(row.simulated_seconds / row.seconds - 1)
        for row in ours
        if row.simulated_seconds is not None
    ]
    gaps = [
        abs(row.bubble - row.simulated_bubble)
        for row in ours
        if row.bubble is not None and row.simulated_bubble is not None
    ]
    if theirs and ours:
        best = min(ours, key=lambda row: row.to_base)
        other = min(theirs, key=lambda row: row.to_base)
        faster = other.to_base / best.to_base
        print(
            f"\nbest of plait ({best.name}): {faster:.3f} times as fast as the best of torch "
            f"({other.name})"
        )
    if errors:
        print(
            f"simulated against measured step: median error {statistics.median(errors):.1%}, "
            f"largest {max(errors):.1%}"
        )
        print(
            f"measured against simulated bubble: largest difference {max(gaps) * 100:.1f} points",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--product", default="rule", choices=["rule", "torch"])
    parser.add_argument("--memory", action="store_true", help="take peak memory instead of time")
    arguments = parser.parse_args()
    announce()
    for size in arguments.ranks:
        for case in arguments.cases:
            names = [
                name
                for name in systems(size)
                if name == BASE or any(word in name for word in arguments.only or [""])
            ]
            if arguments.memory:
                memory_table(CASES[case], size, names, arguments.product)
            else:
                table(CASES[case], size, arguments.rounds, names, arguments.product)


if __name__ == "__main__":
    main()
