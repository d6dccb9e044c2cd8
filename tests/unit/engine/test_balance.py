"""Balancing by bias on text, in small: the experts start uneven, and their load becomes even."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait import datasets, models
from plait.config import Config
from plait.datasets import Loader
from plait.models.losses import cross_entropy
from plait.models.routing import Router
from plait.parallel.expert import Placing
from plait.run.assemble import make_options

MODEL: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32,
    "vocab_size": 256,
    "num_local_experts": 8, "num_experts_per_tok": 2, "scoring_func": "sigmoid",
    "initializer_range": 0.15,
}  # fmt: skip
STEPS = 80
WINDOW = 10
SPEED = 0.02
LIMIT = 1.25


def busiest(speed: float) -> list[float]:
    """Tokens of the busiest expert of the worst layer in units of the mean, in each window of
    steps: a batch is small.
    """
    torch.manual_seed(0)
    model = models.make("llama", **MODEL, router_bias_update_speed=speed or None)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = Loader(
        datasets.make({"name": "stdlib", "seq_len": 64}, {"name": "llama", "vocab_size": 256}), 16
    )
    loads = torch.zeros(STEPS, len(routers), 8)
    for step in range(STEPS):
        inputs, targets = next(batches)
        total, count = cross_entropy(model(inputs), targets)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        for index, router in enumerate(routers):
            assert router.load is not None
            loads[step, index] = router.load[:8]
            router.balance(router.load)
    windows = loads.unflatten(0, (-1, WINDOW)).sum(1)
    return (windows.amax(-1) / windows.mean(-1)).amax(1).tolist()


@pytest.mark.long
def test_the_busiest_expert_falls_to_the_mean() -> None:
    balanced = busiest(SPEED)
    free = busiest(0.0)
    assert balanced[0] > LIMIT and free[0] > LIMIT
    assert balanced[-1] < LIMIT < free[-1]


def test_a_config_says_how_experts_are_placed_and_multiplied() -> None:
    train = {"place_experts_every": 3, "spare_expert_slots": 1, "grouped_product": "loop"}
    config = Config.load(
        {"model": {"name": "llama", **MODEL}, "data": {"name": "stdlib"}, "train": train}
    )
    options = make_options(config)
    assert options.placing == Placing(every=3, spare_slots=1) and options.grouped_product == "loop"
    assert (
        make_options(
            Config.load({"model": {"name": "llama", **MODEL}, "data": {"name": "stdlib"}})
        ).placing
        == Placing()
    )
