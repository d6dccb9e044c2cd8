"""Balancing by bias on text, in small: the experts start uneven, and their load becomes even."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from plait import datasets, models
from plait.datasets import Loader
from plait.models.losses import cross_entropy
from plait.models.routing import Router

MODEL: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 256,
    "num_local_experts": 8, "num_experts_per_tok": 2, "scoring_func": "sigmoid", "initializer_range": 0.15,
}  # fmt: skip
STEPS, SPEED, LIMIT = 50, 0.03, 1.25


def busiest(speed: float) -> list[float]:
    """Tokens of the busiest expert of the model in units of the mean, by step."""
    torch.manual_seed(0)
    model = models.make("llama", **MODEL, router_bias_update_speed=speed or None)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = Loader(datasets.make({"name": "stdlib", "seq_len": 64}, {"name": "llama", "vocab_size": 256}), 16)
    found = []
    for _ in range(STEPS):
        inputs, targets = next(batches)
        total, count = cross_entropy(model(inputs), targets)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        loads = [router.load[:8] for router in routers if router.load is not None]
        found.append(max(float(load.max() / load.mean()) for load in loads))
        for router in routers:
            router.after_update()
    return found


def test_the_busiest_expert_falls_to_the_mean() -> None:
    balanced, free = busiest(SPEED), busiest(0.0)
    assert balanced[0] == free[0] > 2 * LIMIT - 1
    assert statistics.mean(balanced[-10:]) < LIMIT < statistics.mean(free[-10:])
