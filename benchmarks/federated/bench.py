"""Accuracy by rounds: every strategy, on digits of ten clients, from very uneven to even.

    python -m benchmarks.federated.bench [--rounds 20] [--seeds 3] [--only WORD ...] [--bad 2]
    [--out DIR]

Ten clients, one pass over their samples a round, all of them asked. The server's numbers are those
of `SERVER`, the same for all partitions. With `--bad` that many clients send minus three times
their change.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lines import lines
from benchmarks.machine import announce
from plait.config import load
from plait.engine.build import join_world
from plait.outer.federated.messages import Reply, TrainTask
from plait.outer.federated.simulation import LocalFleet, make_server
from plait.plan import Plan

PARTITIONS = {
    "Dirichlet 0.1": ("federated.partition=dirichlet", "federated.alpha=0.1"),
    "Dirichlet 0.5": ("federated.partition=dirichlet", "federated.alpha=0.5"),
    "IID": ("federated.partition=iid",),
}
SERVER = {
    "fedavg": (),
    "fedprox": ("federated.mu=0.1",),
    "fedavgm": ("federated.server_lr=0.3", "federated.server_momentum=0.9"),
    "fedadam": ("federated.server_lr=0.03",),
    "fedyogi": ("federated.server_lr=0.03",),
    "scaffold": (),
    "trimmed": ("federated.trim=0.2",),
    "median": (),
    "krum": ("federated.num_bad=2",),
}
BASE = {
    "model": {
        "name": "mlp",
        "in_features": 64,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "out_features": 10,
    },
    "data": {"name": "digits"},
    "train": {"global_batch": 16, "optimizer": "sgd", "lr": 0.1},
    "plan": {"text": "dp1"},
    "federated": {"clients": 10},
}
SHOWN = (1, 5, 10, 20)


class WithBad(LocalFleet):
    """The first `num_bad` clients lie."""

    num_bad = 0

    def train(self, task: TrainTask, clients: Sequence[int]) -> list[Reply]:
        replies = super().train(task, clients)
        return [
            replace(reply, change=-3 * reply.change) if reply.client < self.num_bad else reply
            for reply in replies
        ]


def accuracies(overrides: Sequence[str], num_bad: int) -> list[float]:
    """After every round, on the samples that the server holds out."""
    config = load(BASE, list(overrides))
    plan = Plan.parse(config.plan.text)
    world = join_world(plan)
    fleet = WithBad(config, plan, world)
    fleet.num_bad = num_bad
    server = make_server(config, fleet.initial())
    found = [done.accuracy for done in server.run(fleet) if done.accuracy is not None]
    world.close()
    return found


def run(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Mean accuracies over seeds, by partition and strategy; kept as they come, and what is there
    is not run again.
    """
    path = None if arguments.out is None else arguments.out / "accuracy.json"
    found: dict[str, dict[str, list[float]]] = (
        json.loads(path.read_text()) if path is not None and path.exists() else {}
    )
    for partition, words in PARTITIONS.items():
        for strategy, numbers in SERVER.items():
            if arguments.only and not any(
                word in f"{partition} {strategy}" for word in arguments.only
            ):
                continue
            if strategy in found.get(partition, {}):
                continue
            common = [
                *words,
                *numbers,
                f"federated.strategy={strategy}",
                f"federated.rounds={arguments.rounds}",
            ]
            common += ["federated.evaluate_every=1000"]
            runs = [
                accuracies([*common, f"train.seed={seed}"], arguments.bad)
                for seed in range(arguments.seeds)
            ]
            found.setdefault(partition, {})[strategy] = [
                statistics.fmean(values) for values in zip(*runs, strict=True)
            ]
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(found, indent=1) + "\n")
            print(
                partition,
                strategy,
                *(f"{value:.3f}" for value in found[partition][strategy]),
                flush=True,
            )
    return found


def table(found: dict[str, dict[str, list[float]]], rounds: int) -> str:
    shown = [number for number in SHOWN if number <= rounds]
    rows = []
    for partition, strategies in found.items():
        rows += [
            f"\n| {partition}, after round | {' | '.join(map(str, shown))} |",
            f"|---|{'---|' * len(shown)}",
        ]
        for strategy, values in strategies.items():
            rows.append(
                f"| {strategy} | "
                f"{' | '.join(f'{100 * values[number - 1]:.1f}' for number in shown)} |"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bad", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    announce()
    torch.set_num_threads(1)
    found = run(arguments)
    print(table(found, arguments.rounds))
    if arguments.out is not None:
        for partition, strategies in found.items():
            series: dict[str, Any] = {
                strategy: [(number + 1, 100 * value) for number, value in enumerate(values)]
                for strategy, values in strategies.items()
            }
            name = partition.lower().replace(" ", "-")
            liars = f", {arguments.bad} of them lie" if arguments.bad else ""
            (arguments.out / f"{name}.svg").write_text(
                lines(series, f"digits, 10 clients{liars}, {partition}", "round", "accuracy, %")
            )


if __name__ == "__main__":
    main()
