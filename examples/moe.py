"""A mixture of experts, pipeline x expert parallel, on the source of Python's standard library.

`python examples/moe.py [--small]`. Its reference is the same model in plain PyTorch on one device.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from common import Task, equal, options, parallel, plain, show

import plait

KEYS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
}
LARGE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
}


def model(small: bool) -> Any:
    from plait import models

    return models.make("llama", **KEYS, **(SMALL if small else LARGE))


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


def main() -> int:
    given = options()
    from plait.models.losses import cross_entropy

    task = Task(
        partial(model, given.small),
        partial(batch, 8),
        cross_entropy,
        6 if given.small else 100,
        lr=1e-3,
    )
    plan = "pp2:1f1b dp2:zero1 ep2 mb2"
    truth = plain(task)
    found = plait.launch(parallel, task, plan, nproc=4)[0]
    show("moe", {"one device, plain PyTorch": truth, plan: found}, given.out)
    print(f"largest difference {equal(found, truth, 2e-3):.1e}")
    assert given.small or truth[-1] < truth[0] - 1, "it has not learnt"
    return 0


if __name__ == "__main__":
    sys.exit(main())
