"""GPT and Llama on the source of Python's standard library, in three dimensions, under five plans
one after the other.

`python examples/language.py [--small]`. The run is stopped four times and goes on under another
plan from its checkpoint: data x tensor x pipeline, a two-dimensional tensor grid, fully sharded
data, zero bubble x tensor, one device. Its reference is plain PyTorch on one device, which knows
none of them; the curve must be one.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from common import Task, equal, options, parallel, plain, show

import plait

CHAIN = ("pp2:1f1b tp2 dp2:zero1 mb4", "tp4:2d", "dp4:zero3", "pp2:zb-h1 tp2 mb4", "dp1")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LARGE = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def model(name: str, small: bool) -> Any:
    from plait import models

    return models.make(
        name, **(SMALL if small else LARGE), vocab_size=256, max_position_embeddings=64
    )


def batch(samples: int, step: int) -> tuple[Any, Any]:
    """Bytes of the standard library's source."""
    from plait import datasets

    return next(
        datasets.Loader(
            datasets.make({"name": "stdlib", "seq_len": 32}, {"vocab_size": 256}),
            samples,
            seed=step,
        )
    )


def chain(task: Task, folder: Path) -> list[float]:
    """The losses of one run under all plans in turn."""
    losses: list[float] = []
    edges = [task.steps * number // len(CHAIN) for number in range(len(CHAIN) + 1)]
    for number, plan in enumerate(CHAIN):
        source = folder / str(number - 1) if number else None
        nproc = plait.Plan.parse(plan).world_size
        part = plait.launch(
            parallel,
            task,
            plan,
            edges[number],
            edges[number + 1],
            (source, folder / str(number)),
            nproc=nproc,
        )[0]
        print(f"  steps {edges[number]} to {edges[number + 1]} under {plan}: loss {part[-1]:.4f}")
        losses += part
    return losses


def main() -> int:
    given = options()
    from plait.models.losses import cross_entropy

    for name in ("gpt",) if given.small else ("gpt", "llama"):
        task = Task(
            partial(model, name, given.small),
            partial(batch, 8),
            cross_entropy,
            10 if given.small else 100,
            lr=1e-3,
        )
        truth = plain(task)
        with tempfile.TemporaryDirectory() as folder:
            found = chain(task, Path(folder))
        show(
            f"language-{name}",
            {"one device, plain PyTorch": truth, "five plans in turn": found},
            given.out,
        )
        print(f"{name}: largest difference {equal(found, truth, 2e-3):.1e}")
        assert given.small or truth[-1] < truth[0] - 1, "it has not learnt"
    return 0


if __name__ == "__main__":
    sys.exit(main())
