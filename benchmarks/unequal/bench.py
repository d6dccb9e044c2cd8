"""Whether shares reach the rate of all ranks together, where one rank is slower.

    python -m benchmarks.unequal.bench [--plan dp2] [--ratio 3] [--batch 128] [--layers 2]
        [--width 256] [--counts 12 4] [--steps 3] [--rounds 5]

The second rank is throttled: `ratio` - 1 busy processes share its core, so that it has one part in
`ratio` of the core's time, in turns of some milliseconds. The aim is what both ranks reach without
a message, added up. For that each trains the whole model at the same time as the other, with as
many samples as its share of a step, or in a quarter of the micro-batches of the pipeline: two busy
cores share their memory, and fewer samples at a time are faster by their caches.

Equal parts run once. Unequal parts and ranks without messages take turns, since a machine's speed
drifts: each round is compared with what both ranks reach just before it and just after it. The
fraction is the median of the rounds, with its quartiles.

Shares are dealt by those two rates, once. Layers are dealt by them and by the part of the work that
a layer and the head have, which two short runs measure by processor time. The last column is what
these parts reach at best: whole samples or layers at those rates, and the filling of a pipeline,
without a message.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import announce
from benchmarks.spread import quartile_text
from plait import Plan, launch
from plait.config import load
from plait.engine.build import join_world
from plait.run.assemble import assemble

MODEL: dict[str, Any] = {
    "name": "gpt",
    "num_attention_heads": 8,
    "vocab_size": 256,
}
SEQ_LEN = 128
WARMUP_STEPS = 1

NEIGHBOUR = """
import os, sys
rank = int(sys.argv[1])
while os.getppid() == rank:
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def throttled(core: int, ratio: float) -> Iterator[None]:
    """This process keeps to one core, with `ratio` - 1 busy processes on it, so that it has one
    part in `ratio` of the core's time.
    """
    cores = sorted(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cores[core % len(cores)]})
    command = (sys.executable, "-c", NEIGHBOUR, str(os.getpid()))
    neighbours = [subprocess.Popen(command) for _ in range(round(ratio) - 1)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def train(
    config: Mapping[str, Any], plan: str, steps: int, ratios: tuple[float, ...]
) -> tuple[float, float]:
    """Seconds of a step and its processor time, where this rank is throttled by its ratio."""
    world = join_world(Plan.parse(plan))
    training = assemble(load(config), Plan.parse(plan), world)
    ratio = ratios[world.rank]
    core = world.rank if ratio == 1.0 else 1
    with throttled(core, ratio):
        for number in range(steps + WARMUP_STEPS):
            if number == WARMUP_STEPS:
                began, used = time.perf_counter(), time.process_time()
            training.engine.step(next(training.loader), trace=False)
        spent = (time.perf_counter() - began, time.process_time() - used)
    world.close()
    return spent[0] / steps, spent[1] / steps


@dataclass(frozen=True)
class Measure:
    """What is measured: steps, samples of one, layers and their width."""

    steps: int
    batch: int
    layers: int
    width: int = 256


def rank_seconds(
    plan: str, measure: Measure, ratios: tuple[float, ...], **keys: tuple[float, ...]
) -> list[tuple[float, float]]:
    """Seconds and processor time of a step of each rank; `keys` are `shares` or `counts`."""
    config = {
        "model": {
            **MODEL,
            "num_hidden_layers": measure.layers,
            "hidden_size": measure.width,
            "intermediate_size": 4 * measure.width,
        },
        "data": {"name": "random", "seq_len": SEQ_LEN},
        "train": {"global_batch": measure.batch},
        "plan": {key: list(numbers) for key, numbers in keys.items()},
    }
    return launch(train, config, plan, measure.steps, ratios, nproc=len(ratios))


def rate(
    plan: str, measure: Measure, ratios: tuple[float, ...], **keys: tuple[float, ...]
) -> float:
    """Samples a second of a plan; `keys` are `shares` or `counts` of `[plan]`."""
    ranks = rank_seconds(plan, measure, ratios, **keys)
    return measure.batch / max(seconds for seconds, _ in ranks)


@dataclass(frozen=True)
class StageWork:
    """Processor time of a stage's parts: of one layer, and of what only the first and the last
    have. The unit is the whole model's.
    """

    layer: float
    first: float
    last: float

    @classmethod
    def measured(cls, plan: str, measure: Measure) -> StageWork:
        """By two short runs without a throttle, of equal stages and of three quartiles of the
        layers on the first. Only parts of one run are compared, as the machine's speed drifts.
        """
        micro_batches = min(16, Plan.parse(plan).micro_batches)
        batch = measure.batch * micro_batches // Plan.parse(plan).micro_batches
        few = replace(measure, steps=4, batch=batch)
        asked = str(replace(Plan.parse(plan), micro_batches=micro_batches))
        half, moved = measure.layers // 2, max(1, measure.layers // 4)
        parts = []
        for more in (0, moved):
            counts = (half + more, measure.layers - half - more)
            used = [time for _, time in rank_seconds(asked, few, (1.0, 1.0), counts=counts)]
            parts.append(used[1] / sum(used))
        layer = (parts[0] - parts[1]) / moved
        last = parts[0] - (measure.layers - half) * layer
        return cls(layer, 1.0 - last - measure.layers * layer, last)

    def parts(self, counts: tuple[int, ...]) -> list[float]:
        """The part of all work that each of two stages has."""
        own = [self.first + counts[0] * self.layer, self.last + counts[1] * self.layer]
        return [one / sum(own) for one in own]


Rates = tuple[float, float]


def without_messages(plan: str, measure: Measure, ratio: float) -> Rates:
    """Samples a second of the fast and of the slow rank, each of which trains the whole model at
    the same time as the other, in parts of a step as `plan` has them.
    """
    if plan.startswith("pp"):
        micro_batches = Plan.parse(plan).micro_batches
        fewer = max(1, micro_batches // 4)
        alone, batches = f"dp1 mb{fewer}", [measure.batch * fewer // micro_batches] * 2
        steps = [2 * round(ratio) + 2, 2]
    else:
        few = round(measure.batch / (ratio + 1))
        alone, batches = "dp1", [measure.batch - few, few]
        steps = [measure.steps] * 2
    measures = [
        replace(measure, batch=batch, steps=count)
        for batch, count in zip(batches, steps, strict=True)
    ]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        fast, slow = pool.map(rate, (alone, alone), measures, ((1.0,), (ratio,)))
    return fast, slow


def at_best(plan: str, measure: Measure, rates: Rates, work: list[float]) -> float:
    """Samples a second of two ranks at their own `rates` that wait for each other alone; `work` is
    the part of all that each has.
    """
    asked = Plan.parse(plan)
    ranks = [measure.batch * part / speed for part, speed in zip(work, rates, strict=True)]
    filling = (sum(ranks) - max(ranks)) / asked.micro_batches if asked.pp.size > 1 else 0.0
    return measure.batch / (max(ranks) + filling)


def best_counts(plan: str, measure: Measure, rates: Rates, work: StageWork) -> tuple[int, int]:
    """The layers of two stages that reach most at these rates."""
    layers = measure.layers
    return max(
        ((layers - few, few) for few in range(1, layers)),
        key=lambda counts: at_best(plan, measure, rates, work.parts(counts)),
    )


@dataclass(frozen=True)
class Parts:
    """What each rank has: the key of `[plan]`, its numbers, and their parts of all work."""

    key: str
    numbers: tuple[int, int]
    own: list[float]
    equal: list[float]

    @classmethod
    def dealt(
        cls, plan: str, measure: Measure, rates: Rates, counts: tuple[int, int] | None
    ) -> Parts:
        """By the rates of both ranks, or layers by `counts`."""
        if not plan.startswith("pp"):
            few = max(1, round(measure.batch * rates[1] / sum(rates)))
            numbers = (measure.batch - few, few)
            return cls("shares", numbers, [one / measure.batch for one in numbers], [0.5, 0.5])
        work = StageWork.measured(plan, measure)
        chosen = counts or best_counts(plan, measure, rates, work)
        half = measure.layers // 2
        return cls("counts", chosen, work.parts(chosen), work.parts((measure.layers - half, half)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="dp2")
    parser.add_argument("--ratio", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--counts", type=int, nargs=2, help="layers of each stage under pp2")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    announce()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plan, ratio = arguments.plan, float(arguments.ratio)
    measure = Measure(arguments.steps, arguments.batch, arguments.layers, arguments.width)
    counts = tuple(arguments.counts) if arguments.counts else None
    both = (1.0, ratio)
    first_rates = without_messages(plan, measure, ratio)
    parts = Parts.dealt(plan, measure, first_rates, counts)
    equal = rate(plan, measure, both) / sum(first_rates)
    rates = [first_rates]
    fractions = []
    for _ in range(arguments.rounds):
        own = rate(plan, measure, both, **{parts.key: parts.numbers})
        rates.append(without_messages(plan, measure, ratio))
        # What both reach is measured before and after, because a machine's speed drifts.
        together = (sum(rates[-2]) + sum(rates[-1])) / 2
        fractions.append(own / together)
        print(f"{own:.1f} of {together:.1f}", file=sys.stderr, flush=True)
    fast, slow = (statistics.median(row) for row in zip(*rates, strict=True))
    best = [at_best(plan, measure, (fast, slow), work) for work in (parts.equal, parts.own)]
    print(f"fast rank {fast:.1f} samples/s, slow rank {slow:.1f}, without messages")
    print(f"{'':28} of both together   at best")
    print(f"{plan + ', equal parts':28} {equal:.2f}   {best[0] / (fast + slow):24.2f}")
    name = f"{plan}, {parts.key} {list(parts.numbers)}"
    print(f"{name:28} {quartile_text(fractions):18} {best[1] / (fast + slow):12.2f}")
    if plan.startswith("pp"):
        print(f"the second stage has {parts.own[1]:.3f} of the processor time")


if __name__ == "__main__":
    main()
