"""What a proof costs beside plain steps: `python -m benchmarks.verify.seconds [--rounds N]`.

A proof of a model with four layers on two ranks, probe by probe, against as many plain steps of one
device in float64. Both take turns. Processor seconds are counted, of ranks too, so other work on
the machine counts little. The start of ranks is measured by a proof of nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch

from benchmarks.machine import announce
from plait.comm import World
from plait.config import load
from plait.plan import Plan
from plait.verify.probes import PROBES
from plait.verify.problem import Problem
from plait.verify.ranks import in_new_world
from plait.verify.reference.one_device import loss_sum
from plait.verify.run import VerifyTask, in_world, problem_of

PLAN = "dp2 precision:float64"
PROBE_NAMES = ("sgd", "adamw")
STEPS = 3
CONFIG = {
    "model": {
        "name": "gpt",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 64,
    },
    "data": {"name": "random", "seq_len": 64},
    "train": {"steps": STEPS, "global_batch": 8, "lr": 1e-3},
    "plan": {"text": "dp2"},
}


def processor_seconds() -> float:
    """Seconds of this process and of the ranks that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def nothing(world: World, task: VerifyTask) -> None:
    """The start and the end of the ranks alone."""


def plain(problem: Problem) -> None:
    """As many steps as the proof takes, as a script would write them."""
    for name in PROBE_NAMES:
        changed = PROBES[name].apply(problem, Plan.parse(PLAN), STEPS)
        assert not isinstance(changed, str)
        one, recipe = changed[0], changed[0].recipe()
        model = one.make_whole_model(torch.float64)
        optimizer = recipe.optimizer(model.parameters())
        for inputs, targets in one.batches(STEPS, torch.float64):
            total, count = loss_sum(recipe.loss, model(inputs), (inputs, targets))
            (total / count).backward()
            optimizer.step()
            optimizer.zero_grad()


def used_by(function: Callable[[], object]) -> float:
    """Processor seconds of a call."""
    before = processor_seconds()
    function()
    return processor_seconds() - before


def main() -> None:
    """The median of each part and of the ratio, over rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    announce()
    problem = problem_of(load(CONFIG))
    task = VerifyTask(problem, PLAN, STEPS, None, PROBE_NAMES)
    rows = []
    for number in range(rounds):
        steps = used_by(lambda: plain(problem))
        start = used_by(lambda: in_new_world(nothing, task))
        proof = used_by(lambda: in_new_world(in_world, task))
        rows.append((steps, start, proof, (proof - start) / steps))
        print(f"round {number}: {steps:.2f} {start:.2f} {proof:.2f}", flush=True)
    names = ("plain steps", "start of two ranks", "proof", "(proof - start) / plain steps")
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        print(f"{name:<30} {statistics.median(values):6.2f}   {min(values):.2f} {max(values):.2f}")


if __name__ == "__main__":
    main()
