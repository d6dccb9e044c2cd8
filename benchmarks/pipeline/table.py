"""What every schedule holds and wastes, measured from runs: 4 ranks, 8 micro-batches, equal times of F, I and W.

    python -m benchmarks.pipeline.table [--ranks 4] [--micro-batches 8] [--unit-ms 20]

A real engine runs a small model; after each action its rank sleeps for the action's share of a unit, so that four ranks on
fewer cores keep the times of the literature (F 1, B 2, I 1, W 1 of a rank's whole share). Live activations and weight versions
are counted by the runtime, bubbles come from the timeline: idle time in the period (from a rank's first pass to its last;
in the steady state, from its first backward to its last forward, where steps overlap).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from plait import comm, models
from plait.engine.build import build
from plait.launcher import launch
from plait.mesh import Mesh
from plait.models.losses import cross_entropy
from plait.pipeline.actions import COMPUTE, Action
from plait.pipeline.clock import unit
from plait.pipeline.observed import COMPUTING
from plait.pipeline.schedules import SCHEDULES, make
from plait.pipeline.simulate import simulate
from plait.trace import Span, Timeline

STEPS = 4


def closed_forms(p: int, m: int) -> dict[str, tuple[Fraction | None, str]]:
    """The literature's bubble as a fraction of the step, and how it is written."""
    flush = 3 * (p - 1)  # units that 1F1B idles; a step's work is 3m

    def share(idle: Fraction) -> Fraction:
        return idle / (3 * m + idle)

    return {
        "naive": (Fraction(p - 1, p), "(p-1)/p"),
        "gpipe": (Fraction(p - 1, m + p - 1), "(p-1)/(m+p-1)"),
        "1f1b": (Fraction(p - 1, m + p - 1), "(p-1)/(m+p-1)"),
        "interleaved": (share(Fraction(flush, 2)), "1F1B's, idle time divided by v = 2"),
        "zb-h1": (share(Fraction(flush, 3)), "a third of 1F1B's idle time"),
        "zb-h2": (Fraction(0), "0"),
        "zbv": (Fraction(0), "0"),
        "v-half": (share(Fraction(flush, 2)), "half of 1F1B's idle time, at most"),
        "v-min": (share(Fraction(2 * flush, 3)), "two thirds of 1F1B's idle time, at most"),
        "dualpipev": (None, ""),
        "pipedream": (Fraction(0), "0 in the steady state"),
        "2bw": (Fraction(0), "0 in the steady state"),
    }


@dataclass(frozen=True)
class Counted:
    """Of one rank."""

    live: dict[int, int]
    versions: int
    steps: list[Timeline]


def run(name: str, size: int, num_micro_batches: int, unit_seconds: float) -> Counted:
    """Runs in every rank."""
    torch.set_num_threads(1)
    world = comm.init(Mesh(pp=size))
    with torch.device("meta"):
        model = models.make("mlp", in_features=8, hidden_size=8, num_hidden_layers=3 * size, out_features=4)
    plan = f"pp{size}:{'interleaved,v2' if name == 'interleaved' else name} mb{num_micro_batches}"
    engine = build(model, plan, loss=cross_entropy, optimizer=lambda params: torch.optim.SGD(params, lr=0.01), world=world)
    share = unit_seconds * size / make(name, size, num_micro_batches, 2 if name == "interleaved" else 1).num_stages
    for kind in {action.kind for action in (*engine._actions, *steps_of(engine))} & COMPUTE:
        engine._handlers[kind] = _as_long_as(engine._handlers[kind], share)
    inputs, targets = torch.randn(num_micro_batches, 8), torch.zeros(num_micro_batches, dtype=torch.int64)
    steps = [engine.step((inputs, targets)).timeline for _ in range(STEPS)]
    live = {stage: part.stage.peak_live for stage, part in engine._pipeline.parts.items()}
    versions = 1 if engine._delayed is None else engine._delayed.versions.peak
    engine.flush()
    world.close()
    return Counted(live, versions, steps)


def steps_of(engine: Any) -> list[Action]:
    """The actions of a stream, which an engine has no list of."""
    return [] if engine._delayed is None else [action for part in engine._delayed._stream._parts for action in part]


def _as_long_as(handler: Callable[[Action], None], share: float) -> Callable[[Action], None]:
    def slept(action: Action) -> None:
        handler(action)
        time.sleep(unit(action) * share)

    return slept


def bubble(spans: Sequence[Span], name: str, share: float) -> float:
    """Idle part of the period, or of the steady state; work is what the actions were made to take."""
    passes = [span for span in spans if span.kind in COMPUTING]
    by_rank = [[span for span in passes if span.rank == rank] for rank in sorted({span.rank for span in passes})]
    if SCHEDULES[name].asynchronous:
        windows = [
            (min(s.start_seconds for s in own if s.kind == "B"), max(s.stop_seconds for s in own if s.kind == "F"))
            for own in by_rank
        ]
    else:
        windows = [(min(s.start_seconds for s in own), max(s.stop_seconds for s in own)) for own in by_rank]
    lengths = [stop - start for start, stop in windows]
    whole = sum(lengths) if SCHEDULES[name].asynchronous else max(lengths) * len(by_rank)
    inside = [
        unit(Action.parse(span.name)) * share
        for own, (start, stop) in zip(by_rank, windows, strict=True)
        for span in own
        if span.start_seconds >= start - 1e-9 and span.stop_seconds <= stop + 1e-9
    ]
    return max(0.0, 1 - sum(inside) / whole)


def semantics(name: str, staleness: Sequence[int]) -> str:
    if not SCHEDULES[name].asynchronous:
        return "one device's"
    return "gradients " + " ".join(map(str, staleness)) + " updates old"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    p, m, unit_seconds = arguments.ranks, arguments.micro_batches, arguments.unit_ms / 1e3
    print(f"{p} ranks, {m} micro-batches, unit {arguments.unit_ms:g} ms, {STEPS} steps\n")
    print(f"{HEAD}\n{'|---' * HEAD.count(' | ')}|---|")
    for name in SCHEDULES:
        print(row(name, p, m, unit_seconds), flush=True)


HEAD = "| schedule | live a stage | of a rank's share | versions | update | bubble % | simulated % | literature |"


def row(name: str, p: int, m: int, unit_seconds: float) -> str:
    schedule = make(name, p, m, 2 if name == "interleaved" else 1)
    result = simulate(make(name, p, m, num_steps=STEPS) if schedule.asynchronous else schedule)
    ranks = launch(run, name, p, m, unit_seconds, nproc=p)
    live = {stage: peak for rank in ranks for stage, peak in rank.live.items()}
    share = unit_seconds * p / schedule.num_stages
    merged = [Timeline.merge(steps) for steps in zip(*(rank.steps for rank in ranks), strict=True)]
    if schedule.asynchronous:
        merged = [Timeline.merge(merged)]
    measured = statistics.median(bubble(step.spans, name, share) for step in merged)
    form, text = closed_forms(p, m)[name]
    wrong = any(live[stage] != peak for stage, peak in enumerate(result.peak_activations))
    cells = [
        name,
        " ".join(str(live[stage]) for stage in sorted(live)) + (" (NOT as simulated)" if wrong else ""),
        " ".join(f"{peak:g}" for peak in result.peak_activations_per_rank),
        " ".join(str(rank.versions) for rank in ranks),
        semantics(name, result.staleness),
        f"{measured * 100:.1f}",
        f"{result.bubble_fraction * 100:.1f}",
        text if form is None else f"{float(form) * 100:.1f}: {text}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
