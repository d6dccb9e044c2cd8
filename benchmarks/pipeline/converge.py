"""Do asynchronous pipelines learn? PipeDream and PipeDream-2BW beside 1F1B on the standard
library's sources.

    python -m benchmarks.pipeline.converge [--schedules 1f1b pipedream 2bw] [--ranks 4] [--steps
    300] [--out FILE]
        [--picture FILE]

The same small GPT, start, batches and AdamW under each schedule. A step is 4 micro-batches: 1F1B
and 2BW update once a step, PipeDream after every micro-batch. Loss in training is the mean over the
last tenth of the steps so far; held out are samples that nobody trains on, judged when the pipeline
has been emptied. With --out the losses are kept, a schedule a line, and schedules that are there
already are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lines import lines
from benchmarks.machine import announce
from plait import models
from plait.datasets.text import stdlib
from plait.engine.build import Options, build, join_world
from plait.launcher import launch
from plait.models.losses import cross_entropy
from plait.plan import Plan

SEQ_LEN = 32
BATCH = 16
HELD_OUT = 64
MICRO_BATCHES = 4
GPT = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}


def batches(steps: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """One a step; and samples that nobody trains on."""
    dataset = stdlib(SEQ_LEN)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1))
    held = order[:HELD_OUT]
    rest = order[HELD_OUT:]
    return [
        dataset.batch(rest[step * BATCH : (step + 1) * BATCH]) for step in range(steps)
    ], dataset.batch(held)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def warm_up(step: int) -> float:
    """Delayed gradients are worst while the weights move fastest."""
    return min(1.0, (step + 1) / 50)


def train(plan_text: str, steps: int) -> dict[str, Any]:
    """Losses of every step, and on what was held out. Runs in every rank."""
    torch.set_num_threads(1)
    plan = Plan.parse(plan_text)
    world = join_world(plan)
    with torch.device("meta"):
        model = models.make("gpt", max_position_embeddings=SEQ_LEN, **GPT)
    options = Options(seed=1, learning_rate=warm_up)
    engine = build(model, plan, loss=cross_entropy, optimizer=adamw, options=options, world=world)
    own, held = batches(steps)
    losses = [engine.step(batch, trace=False).loss for batch in own]
    engine.flush()
    found = {"losses": losses, "held_out": engine.evaluate(held)}
    world.close()
    return found


def smoothed(losses: Sequence[float], count: int = 40) -> list[tuple[float, float]]:
    """(step, mean loss of the steps since the point before), at `count` points."""
    every = max(1, math.ceil(len(losses) / count))
    parts = [
        (stop, losses[max(0, stop - every) : stop]) for stop in range(every, len(losses) + 1, every)
    ]
    return [(stop, sum(part) / len(part)) for stop, part in parts]


def row(name: str, found: dict[str, Any], marks: Sequence[int]) -> str:
    """A line of the table: the mean loss of the ten steps before each mark, and that on what was
    held out.
    """
    losses = found["losses"]
    cells = [f"{sum(losses[max(0, mark - 10) : mark]) / min(10, mark):.3f}" for mark in marks]
    return f"| {' | '.join([name, *cells, format(found['held_out'], '.3f')])} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "pipedream", "2bw"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    announce()
    results: dict[str, Any] = {}
    if arguments.out is not None and arguments.out.exists():
        results = {
            one["name"]: one for one in map(json.loads, arguments.out.read_text().splitlines())
        }
    for name in arguments.schedules:
        if name not in results:
            plan = f"pp{arguments.ranks}:{name} mb{MICRO_BATCHES}"
            results[name] = {
                "name": name,
                **launch(train, plan, arguments.steps, nproc=arguments.ranks)[0],
            }
            if arguments.out is not None:
                with arguments.out.open("a") as out:
                    out.write(json.dumps(results[name]) + "\n")
    marks = [mark for mark in (10, 50, 100, 200, 300, 400, 600, 800) if mark <= arguments.steps]
    print(
        f"{arguments.ranks} ranks, {MICRO_BATCHES} micro-batches of {BATCH // MICRO_BATCHES} x "
        f"{SEQ_LEN} tokens\n"
    )
    print(
        f"| schedule | {' | '.join(f'step {mark}' for mark in marks)} | held out "
        f"|\n|---{'|---' * (len(marks) + 1)}|"
    )
    for name in arguments.schedules:
        print(row(name, results[name], marks))
    if arguments.picture is not None:
        curves = {name: smoothed(results[name]["losses"]) for name in arguments.schedules}
        arguments.picture.write_text(
            lines(curves, "Learning the standard library", "step", "loss in training")
        )


if __name__ == "__main__":
    main()
