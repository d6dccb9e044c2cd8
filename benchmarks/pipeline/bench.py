"""Step time of pipelines: plait's schedules beside torch's, and simulated beside measured time of the same run.

    python -m benchmarks.pipeline.bench [--ranks 2] [--cases compute communication] [--rounds 9] [--only WORD ...]

All systems live in the same ranks, one thread each, and take turns, one step each round; the table shows medians, the
ratio to torch DDP taken round by round, and for plait the simulated step (from the median times of its own actions without
their waits) and both bubbles.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.pipeline.systems import CASES, Case, systems
from plait import comm
from plait.launcher import launch
from plait.mesh import Mesh
from plait.pipeline.actions import Action, Kind
from plait.pipeline.clock import walk
from plait.pipeline.lower import lower
from plait.pipeline.schedules import make
from plait.trace import Timeline

BASE = "torch DDP"
STREAMS = ("plait pipedream", "plait 2bw")


def measure(case_name: str, names: Sequence[str], rounds: int, size: int) -> dict[str, Any]:
    """Seconds of each round by system, and the timelines of plait's traced steps. Runs in every rank."""
    torch.set_num_threads(1)
    world = comm.init(Mesh(pp=size))
    case = CASES[case_name]
    steps: dict[str, Any] = {name: systems(size)[name](case, world) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    traces: dict[str, list[Timeline]] = defaultdict(list)
    gc.disable()
    for round_index in range(rounds + 2):
        for name, step in steps.items():
            world.barrier()
            began = time.perf_counter()
            result = step(trace=True) if name.startswith("plait") else step()
            world.barrier()
            if round_index >= 2:
                seconds[name].append(time.perf_counter() - began)
                if name.startswith("plait"):
                    traces[name].append(result.timeline)
        gc.collect()
    return {"seconds": seconds, "traces": dict(traces)}


def busy(timeline: Timeline) -> dict[str, float]:
    """Seconds of each action of one rank, without the waits inside."""
    found: dict[str, float] = {}
    for span in timeline.spans:
        waits = [c for c in timeline.comms if span.start_seconds <= c.stop_seconds <= span.stop_seconds + 1e-9]
        found[span.name] = span.seconds - min(span.seconds, sum(c.exposed_seconds for c in waits))
    return found


def simulated(
    plan: str, size: int, num_micro_batches: int, by_rank: Sequence[Sequence[Timeline]]
) -> tuple[float, float, float]:
    """(simulated seconds of a step, its bubble, the measured bubble), medians over the rounds."""
    name, _, virtual = plan.partition(",v")
    schedule = lower(make(name, size, num_micro_batches, int(virtual or 1)))
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    shares = []
    for rounds in zip(*by_rank, strict=True):
        work = [busy(timeline) for timeline in rounds]
        for per_action in work:
            for text, spent in per_action.items():
                action = Action.parse(text)
                times[action.kind, action.stage].append(spent)
        whole = max(timeline.seconds for timeline in rounds)
        shares.append(1 - sum(sum(per_action.values()) for per_action in work) / (whole * size))
    medians = {key: statistics.median(spent) for key, spent in times.items()}
    walked = walk(schedule, lambda action: medians.get((action.kind, action.stage), 0.0))
    span = max(event.end for event in walked.events)
    work_seconds = sum(event.end - event.start for event in walked.events)
    return span, 1 - work_seconds / (span * size), statistics.median(shares)


def table(case_name: str, size: int, rounds: int, only: Sequence[str]) -> None:
    names = [name for name in systems(size) if name == BASE or not only or any(word in name for word in only)]
    case = CASES[case_name]
    runs = [[name for name in names if name not in STREAMS]]
    runs += [[BASE, name] for name in names if name in STREAMS]  # alone: a stream has messages under way between its steps
    print(f"\n{case.name}: {case.why}; {size} ranks, {case.num_micro_batches} micro-batches, {rounds} rounds")
    print(f"{'system':<26}{'step ms':>9}{'/ DDP':>8}{'simulated ms':>14}{'bubble %':>10}{'simulated %':>13}")
    for group in runs:
        ranks = launch(measure, case_name, group, rounds, size, nproc=size)
        rows(case, size, group if group is runs[0] else group[1:], ranks)


def rows(case: Case, size: int, names: Sequence[str], ranks: Sequence[Any]) -> None:
    base = ranks[0]["seconds"][BASE]
    for name in names:
        seconds = ranks[0]["seconds"][name]
        ratio = statistics.median(own / other for own, other in zip(seconds, base, strict=True))
        line = f"{name:<26}{statistics.median(seconds) * 1e3:9.1f}{ratio:8.2f}"
        plan = name.removeprefix("plait ")
        if name.startswith("plait") and name not in STREAMS:
            span, bubble, measured = simulated(plan, size, case.num_micro_batches, [rank["traces"][name] for rank in ranks])
            line += f"{span * 1e3:14.1f}{measured * 100:10.1f}{bubble * 100:13.1f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    for size in arguments.ranks:
        for case in arguments.cases:
            table(case, size, arguments.rounds, arguments.only)


if __name__ == "__main__":
    main()
