"""float32 and bf16 under every strategy: the same run as on one device, as far as rounding lets it be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait import datasets
from plait.comm import World
from plait.engine.build import Options, build
from plait.models.losses import cross_entropy
from tests.parity.harness import FAMILIES, SEED, Family

Run = Callable[..., list[Any]]
PLANS = ["dp2", "dp2:ring", "dp2:server", "dp2:zero1", "dp2:zero2", "dp2:zero3", "dp4:zero3", "dp2:zero1,offload"]
GPT = Family("gpt", {**FAMILIES["gpt"].keys, "vocab_size": 256, "max_position_embeddings": 32}, (32,), 256, tokens=True)


def corpus(world: World, plan: str, steps: int) -> tuple[float, dict[str, list[str]], dict[str, int]]:
    """Train on the source of the standard library; the last loss, the dtypes of state, the bytes held."""
    engine = build(
        GPT.model(),
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        options=Options(seed=SEED),
        world=world,
    )
    axis = world.axis("dp")
    dataset = datasets.make({"name": "stdlib", "seq_len": 32}, {"name": "gpt", **GPT.keys})
    loader = datasets.Loader(dataset, 8, dp_size=axis.size, dp_rank=axis.rank)
    for _ in range(steps):
        loss = engine.step(next(loader), trace=False).loss
    state = engine.update.optimizer.state.values()
    dtypes = {
        "parameters": sorted({str(param.dtype) for param in engine.model.parameters()}),
        "masters": sorted({str(piece.value.dtype) for piece in engine.strategy.pieces}),
        "gradients": sorted({str(piece.value.grad.dtype) for piece in engine.strategy.pieces if piece.value.grad is not None}),
        "moments": sorted({str(values["exp_avg"].dtype) for values in state}),
    }
    return loss, dtypes, engine.memory()


@pytest.fixture(scope="module")
def one_device(rank_pool: Any) -> float:
    return float(rank_pool.run(1, corpus, "dp1", 20)[0][0])


@pytest.mark.parametrize("plan", PLANS)
def test_float32_ends_at_the_same_loss(ranks: Run, one_device: float, plan: str) -> None:
    results = ranks(int(plan[2]), corpus, plan, 20, plan=plan)
    assert len({loss for loss, _, _ in results}) == 1
    assert results[0][0] == pytest.approx(one_device, rel=1e-5)
    assert one_device < 5.2  # from 5.55: it has learnt something


@pytest.mark.parametrize("plan", PLANS)
def test_bf16_keeps_float32_masters_and_sums(ranks: Run, one_device: float, plan: str) -> None:
    results = ranks(int(plan[2]), corpus, f"{plan} precision:bf16", 20, plan=plan)
    for loss, dtypes, _ in results:
        assert dtypes == {
            "parameters": ["torch.bfloat16"],
            "masters": ["torch.float32"],
            "gradients": ["torch.float32"],
            "moments": ["torch.float32"],
        }
        assert loss == pytest.approx(one_device, rel=2e-2)


def test_bf16_model_state_is_that_of_mixed_precision(ranks: Run) -> None:
    """2 bytes of parameters; K = 12 of master and moments, sharded; gradients in float32, 4 bytes, sharded from stage 2 on."""
    for _, _, memory in ranks(2, corpus, "dp2:zero2 precision:bf16", 2, plan="dp2"):
        numel = memory["parameters"] / 2
        assert memory["optimizer"] == pytest.approx(12 * numel / 2, rel=0.02)
        assert memory["gradients"] == pytest.approx(4 * numel / 2, rel=0.02)
