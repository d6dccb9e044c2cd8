"""What every schedule holds and wastes, measured from runs: 4 ranks, 8 micro-batches.

    python -m benchmarks.pipeline.table [--ranks 4] [--micro-batches 8] [--cpu [CASE]]
        [--only NAME ...]

A real engine runs on real ranks, each with a clock that goes on by what its actions cost and is
told with the messages (`clocked`), so that ranks may outnumber the cores. An action costs what the
literature says (F 1, B 2, I 1, W 1 of a rank's whole share), with --cpu the CPU time that it took,
of the GPT of a case. The table then has its step beside the simulated one. Live activations and
weight versions are counted by the runtime; the bubble is idle time in the period (from a rank's
first pass to its last; in the steady state, from its first backward to its last forward, where
steps overlap), by those clocks.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import announce
from benchmarks.pipeline.clocked import put_on_clock
from benchmarks.pipeline.systems import CASES
from plait import comm, models
from plait.comm import World
from plait.engine.build import build
from plait.engine.stages.delayed import DelayedUpdates
from plait.launcher import launch
from plait.mesh import Mesh
from plait.models.losses import cross_entropy
from plait.parallel.pipeline.actions import Schedule
from plait.parallel.pipeline.clock import unit
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.observed import COMPUTING, observed_action_costs, simulated_step
from plait.parallel.pipeline.schedules import SCHEDULES, make
from plait.parallel.pipeline.simulate import simulate
from plait.trace import Span, Timeline

STEPS = 4
WARM = 2


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
    """Of one rank and schedule."""

    live: dict[int, int]
    versions: int
    steps: list[Timeline]


def run(names: Sequence[str], size: int, num_micro_batches: int, case: str) -> list[Counted]:
    """Every schedule in turn, in every rank. `case`: whose CPU times count; empty: the
    literature's.
    """
    torch.set_num_threads(1)
    world = comm.init(Mesh(pp=size))
    found = [run_one(world, name, num_micro_batches, case) for name in names]
    world.close()
    return found


def run_one(world: World, name: str, num_micro_batches: int, case: str) -> Counted:
    plan = (
        f"pp{world.size}:{'interleaved,v2' if name == 'interleaved' else name} "
        f"mb{num_micro_batches}"
    )
    model, batch = gpt(case, num_micro_batches) if case else mlp(world.size, num_micro_batches)
    engine = build(
        model,
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        world=world,
    )
    clock = put_on_clock(
        engine,
        (lambda action, seconds: seconds) if case else (lambda action, seconds: unit(action)),
    )
    steps = []
    for _ in range(WARM + STEPS):
        engine.step(batch, trace=False)
        steps.append(clock.take_step(restart=not SCHEDULES[name].facts.asynchronous))
    live = {stage: part.stage.peak_live for stage, part in engine.pipeline.parts.items()}
    timing = engine._training_step.timing
    versions = timing.versions.peak if isinstance(timing, DelayedUpdates) else 1
    engine.flush()
    return Counted(live, versions, steps if SCHEDULES[name].facts.asynchronous else steps[WARM:])


def mlp(size: int, num_micro_batches: int) -> tuple[Any, tuple[Tensor, Tensor]]:
    """A model of next to no work, and a batch."""
    with torch.device("meta"):
        model = models.make(
            "mlp", in_features=8, hidden_size=8, num_hidden_layers=3 * size, out_features=4
        )
    return model, (
        torch.randn(num_micro_batches, 8),
        torch.zeros(num_micro_batches, dtype=torch.int64),
    )


def gpt(case_name: str, num_micro_batches: int) -> tuple[Any, tuple[Tensor, Tensor]]:
    """The model of a case, and a batch of so many of its micro-batches."""
    case = CASES[case_name]
    inputs, targets = case.batch()
    num_samples = num_micro_batches * len(inputs) // case.num_micro_batches
    repeats = -(-num_samples // len(inputs))
    return case.model("meta"), (
        inputs.repeat(repeats, 1)[:num_samples],
        targets.repeat(repeats, 1)[:num_samples],
    )


def step_seconds(timeline: Timeline) -> float:
    """From the first pass of any rank to the last."""
    windows = [window([span], steady=False) for span in timeline.spans if span.kind in COMPUTING]
    return max(stop for _, stop in windows) - min(start for start, _ in windows)


def bubble(spans: Sequence[Span], *, steady: bool) -> float:
    """Idle part of the period, or of the steady state."""
    by_rank = [
        [span for span in spans if span.rank == rank]
        for rank in sorted({span.rank for span in spans})
    ]
    windows = [window(own, steady=steady) for own in by_rank]
    lengths = [stop - start for start, stop in windows]
    whole = sum(lengths) if steady else max(lengths) * len(by_rank)
    inside = [
        span.seconds
        for own, (start, stop) in zip(by_rank, windows, strict=True)
        for span in own
        if span.start_seconds >= start - 1e-9 and span.stop_seconds <= stop + 1e-9
    ]
    return max(0.0, 1 - sum(inside) / whole)


def window(spans: Sequence[Span], *, steady: bool) -> tuple[float, float]:
    """From a rank's first pass to its last; of the steady state, from its first backward to its
    last forward.
    """
    passes = [span for span in spans if span.kind in COMPUTING]
    first = [span for span in passes if span.kind == "B"] if steady else passes
    last = [span for span in passes if span.kind == "F"] if steady else passes
    return min(span.start_seconds for span in first), max(span.stop_seconds for span in last)


def semantics(name: str, staleness: Sequence[int]) -> str:
    if not SCHEDULES[name].facts.asynchronous:
        return "one device's"
    return "gradients " + " ".join(map(str, staleness)) + " updates old"


def walked(schedule: Schedule, steps: Sequence[Timeline]) -> Timeline:
    """The simulated step of the median of what each action took, which depends on its place: of
    weight gradients that stand together the last makes them all.
    """
    return simulated_step(lower(schedule), {}, own=observed_action_costs(steps))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument(
        "--cpu",
        nargs="?",
        const="compute",
        default="",
        choices=list(CASES),
        metavar="CASE",
        help="actions cost the CPU time that they take, of the GPT of a case (default: compute)",
    )
    parser.add_argument("--only", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    arguments = parser.parse_args()
    announce()
    p = arguments.ranks
    m = arguments.micro_batches
    case = arguments.cpu
    print(
        f"{p} ranks, {m} micro-batches, {STEPS} steps; "
        f"{f'CPU times of {case}' if case else 'times of the literature'}\n"
    )
    ranks = launch(run, arguments.only, p, m, case, nproc=p)
    head = HEAD + STEP_HEAD if case else HEAD
    print(f"{head}\n{'|---' * head.count(' | ')}|---|")
    for index, name in enumerate(arguments.only):
        print(row(name, p, m, [rank[index] for rank in ranks], cpu=bool(case)), flush=True)


HEAD = (
    "| schedule | live a stage | of a rank's share | versions | update | bubble % | simulated "
    "% | literature |"
)
STEP_HEAD = " step ms | simulated ms |"


def row(name: str, p: int, m: int, ranks: Sequence[Counted], *, cpu: bool) -> str:
    asynchronous = SCHEDULES[name].facts.asynchronous
    schedule = make(
        name, p, m, 2 if name == "interleaved" else 1, num_steps=WARM + STEPS if asynchronous else 1
    )
    result = simulate(schedule)
    live = {stage: peak for rank in ranks for stage, peak in rank.live.items()}
    steps = [Timeline.merge(parts) for parts in zip(*(rank.steps for rank in ranks), strict=True)]
    steps = [Timeline.merge(steps)] if asynchronous else steps
    measured = statistics.median(bubble(step.spans, steady=asynchronous) for step in steps)
    walk = walked(schedule, steps) if cpu else None
    simulated = result.bubble_fraction if walk is None else bubble(walk.spans, steady=asynchronous)
    form, text = closed_forms(p, m)[name]
    wrong = any(live[stage] != peak for stage, peak in enumerate(result.peak_activations))
    cells = [
        name,
        " ".join(str(live[stage]) for stage in sorted(live))
        + (" (NOT as simulated)" if wrong else ""),
        " ".join(f"{peak:g}" for peak in result.peak_activations_per_rank),
        " ".join(str(rank.versions) for rank in ranks),
        semantics(name, result.staleness),
        f"{measured * 100:.1f}",
        f"{simulated * 100:.1f}",
        text if form is None else f"{float(form) * 100:.1f}: {text}",
    ]
    if walk is not None:
        measured_seconds = statistics.median(step_seconds(step) for step in steps)
        cells += [f"{measured_seconds * 1e3:.1f}", f"{step_seconds(walk) * 1e3:.1f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
