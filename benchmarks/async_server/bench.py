"""The asynchronous server: does it converge, is it what its record says, and does a slow worker
hold up the others?

    python -m benchmarks.async_server.bench convergence [--problems digits corpus] [--stale 1 4 16]
    [--steps 200] python -m benchmarks.async_server.bench throughput [--seconds 15] [--workers 4]

Convergence: four workers, two servers, float64, worker 0 slowed. The servers record which gradient,
computed on which version, went into which update; one device makes the same updates again
(`tests.parity.replay`), and the largest relative difference of the weights is told. Throughput:
workers whose step takes a given time as on a device of its own (they wait; this machine has fewer
cores than workers), one of them four times as long. `own` is what each worker does alone, without a
server.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from tests.parity.harness import SEED, join
from tests.parity.replay import Recorded, fresh, load, replay
from torch import Tensor, nn

from benchmarks.machine import announce
from plait import models
from plait.datasets.digits import Digits
from plait.datasets.text import stdlib
from plait.engine.build import Options, build, join_world
from plait.launcher import launch
from plait.models import losses
from plait.outer import Asynchrony, AsyncServerDriver
from plait.plan import Plan
from plait.verify.record.compare import largest, relative_error

WORKERS = 4
SERVERS = 2
HELD_OUT = 128
GPT = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 32,
}
MLP = {"in_features": 64, "hidden_size": 32, "num_hidden_layers": 1, "out_features": 10}


@dataclass(frozen=True)
class Problem:
    """A model, its data, and an optimizer that does well on it."""

    name: str

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return models.make("mlp", **MLP) if self.name == "digits" else models.make("gpt", **GPT)

    def batches(
        self, steps: int
    ) -> tuple[list[list[tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]]:
        """By worker and step; and samples that nobody trains on."""
        dataset: Any = Digits(flat=True) if self.name == "digits" else stdlib(32)
        samples = 16 if self.name == "digits" else 4
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1))
        held = order[:HELD_OUT]
        rest = order[HELD_OUT:]

        def batch(indices: Tensor) -> tuple[Tensor, Tensor]:
            inputs, targets = dataset.batch(indices)
            return inputs.double() if inputs.is_floating_point() else inputs, targets

        def own(worker: int, step: int) -> Tensor:
            begin = (step * WORKERS + worker) * samples
            return rest[torch.arange(begin, begin + samples) % len(rest)]

        return [
            [batch(own(worker, step)) for step in range(steps)] for worker in range(WORKERS)
        ], batch(held)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        if self.name == "digits":
            return torch.optim.SGD(params, lr=0.2, momentum=0.5)
        return torch.optim.AdamW(params, lr=4e-3, weight_decay=0.1, eps=1e-6)


def train(problem: Problem, plan_text: str, steps: int, slow_seconds: float, rate: str) -> Any:
    """What this rank's pieces are in the end, and the record of its server. Runs in every rank."""
    torch.set_num_threads(1)
    plan = Plan.parse(plan_text)
    world = join_world(plan)
    axis = world.axis("dp")
    options = Options(seed=SEED, num_servers=SERVERS, asynchrony=Asynchrony(staleness_rate=rate))
    engine = build(
        problem.model(),
        plan,
        loss=losses.cross_entropy,
        optimizer=problem.optimizer,
        options=options,
        world=world,
    )
    driver = engine.driver
    server = driver.server if isinstance(driver, AsyncServerDriver) else None
    if server is not None:
        server.log = []
    axis.barrier()
    engine.before_update.append(lambda e: time.sleep(slow_seconds if axis.rank == 0 else 0.0))
    for batch in problem.batches(steps)[0][axis.rank]:
        engine.step(batch, trace=False)
    driver.synchronize()
    parts = [
        (p.name, p.global_shape, p.index(), p.values.clone()) for p in engine.local_parameters()
    ]
    record = None
    if server is not None:
        record = Recorded(
            tuple(dict.fromkeys(p.name for p in engine.strategy.pieces)),
            tuple(server.log or ()),
            axis.rank,
        )
    world.close()
    return parts, record


@torch.no_grad()
def judged(
    problem: Problem, weights: dict[str, Tensor], held: tuple[Tensor, Tensor]
) -> tuple[float, float]:
    """(loss, accuracy) on the samples that nobody trained on."""
    model = fresh(problem)  # type: ignore[arg-type]
    load(model, {name: weights[name].view_as(param) for name, param in model.named_parameters()})
    output = model(held[0])
    total, count = losses.cross_entropy(output, held[1])
    return float(total / count), float((output.argmax(dim=-1) == held[1]).double().mean())


def convergence(problem: Problem, stale: int, steps: int, slow_seconds: float) -> str:
    plan = (
        f"dp{WORKERS}:{'server' if stale == 0 else f'async-server,stale{stale}'} precision:float64"
    )
    results = launch(train, problem, plan, steps, slow_seconds, "constant", nproc=WORKERS)
    weights = join([parts for parts, _ in results])
    records = [record for _, record in results if record is not None]
    batches, held = problem.batches(steps)
    loss, accuracy = judged(problem, weights, held)
    row = f"| {problem.name} | {stale or '0 (synchronous)'} | {loss:.3f} | {100 * accuracy:.1f} |"
    if not records:
        return f"{row} | | |"
    ages = Counter(age for record in records for applied in record.log for age in applied.staleness)
    expected = replay(problem, batches, records, problem.optimizer)  # type: ignore[arg-type]
    error = max(
        relative_error(weights[n].view_as(v), v, largest(expected)) for n, v in expected.items()
    )
    mean = sum(age * count for age, count in ages.items()) / sum(ages.values())
    return f"{row} {mean:.1f}, {max(ages)} | {error:.1e} |"


def pace(
    plan_text: str, step_seconds: float, slow: int, seconds: float
) -> tuple[int, float, dict[int, int]]:
    """Steps of this worker, and how long they took. Runs in every rank; under the synchronous
    server all do equally many.
    """
    torch.set_num_threads(1)
    plan = Plan.parse(plan_text)
    world = join_world(plan)
    axis = world.axis("dp")
    problem = Problem("digits")
    options = Options(seed=SEED, num_servers=min(SERVERS, axis.size))
    engine = build(
        problem.model(),
        plan,
        loss=losses.cross_entropy,
        optimizer=problem.optimizer,
        options=options,
        world=world,
    )
    own = step_seconds * (4 if axis.rank == slow else 1)
    engine.before_update.append(lambda e: time.sleep(own))
    inputs, targets = Digits(flat=True).batch(torch.arange(16))
    for _ in range(3):
        engine.step((inputs, targets), trace=False)
    engine.driver.synchronize()
    fixed = engine.driver.is_synchronous and axis.size > 1
    began = time.perf_counter()
    steps = 0
    while steps < seconds / (4 * step_seconds) if fixed else time.perf_counter() - began < seconds:
        engine.step((inputs, targets), trace=False)
        steps += 1
    taken = time.perf_counter() - began
    ages = dict(engine.driver.staleness()) if isinstance(engine.driver, AsyncServerDriver) else {}
    engine.driver.synchronize()
    world.close()
    return steps, taken, ages


def throughput(workers: int, step_seconds: float, seconds: float, stales: list[int]) -> str:
    fast = pace_of(launch(pace, "dp1", step_seconds, -1, seconds / 3, nproc=1))
    slow = pace_of(launch(pace, "dp1", step_seconds, 0, seconds / 3, nproc=1))
    whole = (workers - 1) * fast + slow
    rows = [
        f"{workers} workers, own rates {fast:.1f} and (one) {slow:.1f} steps/s, sum {whole:.1f}\n",
        "| | steps/s of all | of the sum | staleness: mean, largest |",
        "|---|---|---|---|",
    ]
    for name, plan in [("synchronous", f"dp{workers}:server")] + [
        (f"K = {stale}", f"dp{workers}:async-server,stale{stale}") for stale in stales
    ]:
        results = launch(pace, plan, step_seconds, 0, seconds, nproc=workers)
        rate = pace_of(results)
        ages: Counter[int] = Counter()
        for _, _, found in results:
            ages.update(found)
        told = (
            f"{sum(a * n for a, n in ages.items()) / sum(ages.values()):.1f}, {max(ages)}"
            if ages
            else ""
        )
        rows.append(f"| {name} | {rate:.1f} | {100 * rate / whole:.0f} % | {told} |")
        print(rows[-1], flush=True)
    return "\n".join(rows)


def pace_of(results: list[Any]) -> float:
    return sum(steps / taken for steps, taken, _ in results)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["convergence", "throughput"])
    parser.add_argument("--problems", nargs="+", default=["digits", "corpus"])
    parser.add_argument("--stale", nargs="+", type=int, default=[0, 1, 4, 16])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--slow-seconds", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    announce()
    if arguments.what == "throughput":
        stales = [stale for stale in arguments.stale if stale]
        print(throughput(arguments.workers, arguments.step_seconds, arguments.seconds, stales))
        return
    print(
        "| | K | loss | accuracy, % | staleness: mean, largest | replay differs by "
        "|\n|---|---|---|---|---|---|"
    )
    for problem in arguments.problems:
        for stale in arguments.stale:
            print(
                convergence(Problem(problem), stale, arguments.steps, arguments.slow_seconds),
                flush=True,
            )


if __name__ == "__main__":
    main()
