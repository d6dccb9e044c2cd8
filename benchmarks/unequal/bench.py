"""Whether shares reach the rate of all ranks together, where one rank is slower.

    python -m benchmarks.unequal.bench [--steps 30] [--ratio 3] [--plan dp2] [--processor]
        [--batch 64] [--layers 16] [--counts 12 4] [--cycle 0.01]

The second rank is throttled: another process stops and continues it, so that it runs one part in
`ratio` of the time, once in `--cycle` seconds. A row has the samples a second, and their fraction
of what both ranks reach without a message, added up. For that each trains the whole model at the
same time as the other, with as many samples as its share of a step, or in the micro-batches of the
pipeline: two busy cores share their memory, and fewer samples at a time are faster by their caches.
Shares are dealt by those two rates. Layers are dealt by them and by the processor time of a layer,
of the embedding's stage and of the head's, which two short runs measure: the head takes more of a
slow rank than its operations say. The last column is what these parts reach at best: whole samples
or layers at those rates, and the filling of a pipeline, without a message.

A busy machine makes all of it noise. `--processor` throttles nothing and counts each rank's
processor time instead, the slow rank's `ratio` times; a step lasts as long as the slowest rank.
That is the division of work alone, without waiting for messages. A pipeline's step is longer by the
work of one micro-batch on every other rank, which fills and empties it.
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
from typing import Any

from benchmarks.machine import announce
from plait import Plan, launch
from plait.config import load
from plait.engine.build import join_world
from plait.run.assemble import assemble

MODEL: dict[str, Any] = {
    "name": "gpt",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 256,
}
SEQ_LEN = 128
WARMUP_STEPS = 3

THROTTLE = """
import os, signal, sys, time
rank, running, cycle = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
begin = time.monotonic()
wait = lambda until: time.sleep(max(0.0, until - time.monotonic()))
try:
    while True:
        wait(begin + running)
        os.kill(rank, signal.SIGSTOP)
        begin += cycle
        wait(begin)
        os.kill(rank, signal.SIGCONT)
except ProcessLookupError:
    pass
"""


@contextlib.contextmanager
def throttled(ratio: float, cycle: float) -> Iterator[None]:
    """This process runs one part in `ratio` of every `cycle` seconds."""
    if ratio == 1.0:
        yield
        return
    times = (str(cycle / ratio), str(cycle))
    throttle = subprocess.Popen([sys.executable, "-c", THROTTLE, str(os.getpid()), *times])
    try:
        yield
    finally:
        throttle.kill()
        throttle.wait()


def train(
    config: Mapping[str, Any],
    plan: str,
    steps: int,
    ratios: tuple[float, ...],
    cycle: float,
    processor: bool = False,
) -> float:
    """The median seconds of a step, where this rank is throttled by its ratio in every `cycle`
    seconds. `processor`: its processor time, times its ratio.
    """
    clock = time.process_time if processor else time.perf_counter
    world = join_world(Plan.parse(plan))
    training = assemble(load(config), Plan.parse(plan), world)
    seconds = []
    ratio = ratios[world.rank]
    with throttled(1.0 if processor else ratio, cycle):
        for _ in range(steps + WARMUP_STEPS):
            began = clock()
            training.engine.step(next(training.loader), trace=False)
            seconds.append(clock() - began)
    world.close()
    return statistics.median(seconds[WARMUP_STEPS:]) * (ratio if processor else 1.0)


@dataclass(frozen=True)
class Measure:
    """How rates are measured: steps, samples of one, layers, seconds of the throttle's cycle, and
    whether by processor time.
    """

    steps: int
    batch: int
    layers: int
    cycle: float
    processor: bool

    def step_seconds(self, ranks: list[float], micro_batches: int) -> float:
        """Seconds of a step from those of each rank, of one stage each."""
        if not self.processor:
            return max(ranks)
        filling = (sum(ranks) - max(ranks)) / micro_batches if micro_batches else 0.0
        return max(ranks) + filling


def rank_seconds(
    plan: str, measure: Measure, ratios: tuple[float, ...], **keys: tuple[float, ...]
) -> list[float]:
    """Seconds of a step of each rank; `keys` are `shares` or `counts` of `[plan]`."""
    config = {
        "model": {**MODEL, "num_hidden_layers": measure.layers},
        "data": {"name": "random", "seq_len": SEQ_LEN},
        "train": {"global_batch": measure.batch},
        "plan": {key: list(numbers) for key, numbers in keys.items()},
    }
    how = (measure.steps, ratios, measure.cycle, measure.processor)
    return launch(train, config, plan, *how, nproc=len(ratios))


def rate(
    plan: str, measure: Measure, ratios: tuple[float, ...], **keys: tuple[float, ...]
) -> float:
    """Samples a second of a plan; `keys` are `shares` or `counts` of `[plan]`."""
    found = rank_seconds(plan, measure, ratios, **keys)
    asked = Plan.parse(plan)
    return measure.batch / measure.step_seconds(
        found, asked.micro_batches if asked.pp.size > 1 else 0
    )


@dataclass(frozen=True)
class StageWork:
    """Processor time of a stage's parts: of one layer, and of what only the first and the last
    have.
    """

    layer: float
    first: float
    last: float

    @classmethod
    def measured(cls, plan: str, measure: Measure) -> StageWork:
        """By two short runs without a throttle, of equal stages and of three quarters of the
        layers on the first.
        """
        micro_batches = min(16, Plan.parse(plan).micro_batches)
        few = replace(
            measure,
            steps=2,
            batch=measure.batch * micro_batches // Plan.parse(plan).micro_batches,
            processor=True,
        )
        asked = str(replace(Plan.parse(plan), micro_batches=micro_batches))
        half = measure.layers // 2
        moved = max(1, measure.layers // 4)
        equal, other = (
            rank_seconds(asked, few, (1.0, 1.0), counts=(half + more, measure.layers - half - more))
            for more in (0, moved)
        )
        layer = (other[0] - equal[0] + equal[1] - other[1]) / (2 * moved)
        return cls(layer, equal[0] - half * layer, equal[1] - (measure.layers - half) * layer)

    def parts(self, counts: tuple[int, ...]) -> list[float]:
        """The part of all work that each of two stages has."""
        own = [self.first + counts[0] * self.layer, self.last + counts[1] * self.layer]
        return [one / sum(own) for one in own]


def without_messages(plan: str, measure: Measure, ratio: float) -> tuple[float, float]:
    """Samples a second of the fast and of the slow rank, each of which trains the whole model at
    the same time as the other, in parts of a step as `plan` has them.
    """
    alone = "dp1"
    batches = [measure.batch, measure.batch]
    if plan.startswith("pp"):
        alone = f"dp1 mb{Plan.parse(plan).micro_batches}"
    else:
        few = round(measure.batch / (ratio + 1))
        batches = [measure.batch - few, few]
    measures = [replace(measure, batch=batch) for batch in batches]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        fast, slow = pool.map(rate, (alone, alone), measures, ((1.0,), (ratio,)))
    return fast, slow


def at_best(plan: str, measure: Measure, rates: tuple[float, float], work: list[float]) -> float:
    """Samples a second of two ranks at their own `rates` that wait for each other alone; `work` is
    the part of all that each has.
    """
    asked = Plan.parse(plan)
    ranks = [measure.batch * part / speed for part, speed in zip(work, rates, strict=True)]
    filling = (sum(ranks) - max(ranks)) / asked.micro_batches if asked.pp.size > 1 else 0.0
    return measure.batch / (max(ranks) + filling)


def best_counts(
    plan: str, measure: Measure, rates: tuple[float, float], work: StageWork
) -> tuple[int, int]:
    """The layers of two stages that reach most at these rates."""
    layers = measure.layers
    return max(
        ((layers - few, few) for few in range(1, layers)),
        key=lambda counts: at_best(plan, measure, rates, work.parts(counts)),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ratio", type=int, default=3)
    parser.add_argument("--plan", default="dp2")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--counts", type=int, nargs=2, help="layers of each stage under pp2")
    parser.add_argument("--cycle", type=float, default=0.01, help="seconds of the throttle")
    parser.add_argument("--processor", action="store_true")
    arguments = parser.parse_args()
    announce()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ratio = float(arguments.ratio)
    measure = Measure(
        arguments.steps,
        arguments.batch,
        arguments.layers,
        arguments.cycle,
        arguments.processor,
    )
    both = (1.0, ratio)
    plan = arguments.plan
    fast, slow = without_messages(plan, measure, ratio)
    rates = (fast, slow)
    together = fast + slow

    def show(name: str, samples: float, best: float = 0.0) -> None:
        bound = f"{best / together:17.2f}" if best else ""
        print(f"{name:28} {samples:9.1f}   {samples / together:.2f}{bound}", flush=True)

    print(f"{'':28} samples/s   of both together   at best")
    show("fast rank, no messages", fast)
    show("slow rank, no messages", slow)
    if plan.startswith("pp"):
        work = StageWork.measured(plan, measure)
        key = "counts"
        parts = tuple(arguments.counts or best_counts(plan, measure, rates, work))
        half = arguments.layers // 2
        equal, own = work.parts((arguments.layers - half, half)), work.parts(parts)
    else:
        few = max(1, round(arguments.batch * slow / together))
        key, parts = "shares", (arguments.batch - few, few)
        equal, own = [0.5, 0.5], [part / arguments.batch for part in parts]
    show(f"{plan}, equal parts", rate(plan, measure, both), at_best(plan, measure, rates, equal))
    best = at_best(plan, measure, rates, own)
    show(f"{plan}, {key} {list(parts)}", rate(plan, measure, both, **{key: parts}), best)
    if plan.startswith("pp"):
        print(f"the second stage has {own[1]:.3f} of the processor time")


if __name__ == "__main__":
    main()
