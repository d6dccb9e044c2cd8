"""What a proof costs beside plain steps: `python -m benchmarks.verify.seconds [--rounds N]`.

A proof of a model with four layers on two ranks, probe by probe, against as many plain steps of one
device in float64. Both take turns. Processor seconds are counted, of ranks too, so other work on
the machine counts little. The start is that of ranks which each do one plain step: what torch loads
and prepares at first use is a part of it. Two sizes show what does not grow with the model.
"""

from __future__ import annotations

import argparse
import statistics
import time
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
WIDTHS = (128, 256)
SEQ_LEN = 128


def config_of(width: int, layers: int = 4) -> dict[str, dict[str, object]]:
    """A small language model; 8 samples of 128 tokens a step."""
    return {
        "model": {
            "name": "gpt",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": 4,
            "vocab_size": 256,
            "max_position_embeddings": SEQ_LEN,
        },
        "data": {"name": "random", "seq_len": SEQ_LEN},
        "train": {"steps": STEPS, "global_batch": 8, "lr": 1e-3},
        "plan": {"text": "dp2"},
    }


def used_by_ranks(world: World) -> float:
    """Processor seconds of all ranks since they began; the server that forks them waits for none
    of them, so each is asked. Collective.
    """
    return sum(world.axis("world").gather_objects(time.process_time()))


def first_use(world: World, task: VerifyTask) -> float:
    """The start of the ranks: one plain step of a tiny model in each."""
    tiny = problem_of(load(config_of(width=8, layers=1)))
    plain(tiny, steps=1)
    return used_by_ranks(world)


def proof(world: World, task: VerifyTask) -> float:
    """The proof, start included."""
    assert in_world(world, task).ok
    return used_by_ranks(world)


def plain(problem: Problem, steps: int = STEPS) -> None:
    """As many steps as the proof takes, as a script would write them."""
    for name in PROBE_NAMES:
        changed = PROBES[name].apply(problem, Plan.parse(PLAN), steps)
        assert not isinstance(changed, str)
        one, recipe = changed[0], changed[0].recipe()
        model = one.make_whole_model(torch.float64)
        optimizer = recipe.optimizer(model.parameters())
        for inputs, targets in one.batches(steps, torch.float64):
            total, count = loss_sum(recipe.loss, model(inputs), (inputs, targets))
            (total / count).backward()
            optimizer.step()
            optimizer.zero_grad()


def used_by(function: Callable[[], object]) -> float:
    """Processor seconds of a call in this process."""
    before = time.process_time()
    function()
    return time.process_time() - before


def main() -> None:
    """The median of each part and of the ratio, over rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    announce()
    print("| hidden size | plain steps | start of two ranks | proof | (proof - start) / plain |")
    print("|---|---|---|---|---|")
    for width in WIDTHS:
        problem = problem_of(load(config_of(width)))
        task = VerifyTask(problem, PLAN, STEPS, None, PROBE_NAMES)
        plain(problem, steps=1)
        rows = []
        for _ in range(rounds):
            steps = used_by(lambda one=problem: plain(one))  # type: ignore[misc]
            start = in_new_world(first_use, task)
            whole = in_new_world(proof, task)
            rows.append((steps, start, whole, (whole - start) / steps))
        cells = [
            f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            for values in zip(*rows, strict=True)
        ]
        print(f"| {width} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
