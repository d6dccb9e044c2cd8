"""The accounts of the data axis: bytes sent, bytes held, and what a sum is, each against its
formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from plait import models
from plait.comm import World
from plait.engine.build import build
from plait.models.losses import cross_entropy
from plait.parallel import data
from plait.parallel.data import DataGroup

Run = Callable[..., list[Any]]
KEYS = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 16,
}


def gpt() -> nn.Module:
    with torch.device("meta"):
        return models.make("gpt", **KEYS)


def accounts(world: World, plan: str) -> dict[str, Any]:
    engine = build(
        gpt(),
        plan,
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        world=world,
    )
    tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(world.rank))
    for _ in range(2):
        result = engine.step((tokens[:, :-1], tokens[:, 1:]))
    numel = sum(param.numel() for param in engine.model.parameters())
    return {
        "numel": numel,
        "sent": result.ledger.by_axis().get("dp", 0),
        "padding": result.ledger.padding_bytes(),
        "memory": engine.memory(),
        "ops": {
            op: result.ledger.num("dp", op) for op in ("all_reduce", "reduce_scatter", "all_gather")
        },
    }


def theory(strategy: str, size: int, micro_batches: int) -> float:
    """Bytes sent by a rank in a step, in units of the parameters' bytes."""
    share = (size - 1) / size
    factors = {
        "allreduce": 2.0,
        "ring": 2.0,
        "zero1": 2.0,
        "zero2": 1.0 + micro_batches,
        "zero3": 3.0 * micro_batches,
    }
    return factors[strategy] * share


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", ["allreduce", "ring", "zero1", "zero2", "zero3"])
def test_traffic_equals_theory(ranks: Run, strategy: str, size: int, micro_batches: int) -> None:
    plan = f"dp{size}:{strategy} mb{micro_batches}"
    for rank in ranks(size, accounts, plan, plan=plan):
        assert rank["sent"] == theory(strategy, size, micro_batches) * rank["numel"] * 4
        assert rank["padding"] == 0


def test_hybrid_sharding_sends_little_between_replicas(ranks: Run) -> None:
    """Shards over 2 ranks, replicas over 2: 3/2 B inside the shard group, 2 (1/2) (B/2) between the
    replicas.
    """
    for rank in ranks(4, accounts, "dp4:zero3,replicate2", plan="dp4:zero3,replicate2"):
        assert rank["sent"] == (1.5 + 0.5) * rank["numel"] * 4


def test_servers_send_what_their_keys_weigh(ranks: Run) -> None:
    """A worker pushes all keys but its own, and (its share of) every broadcast: B - B_own + (N-1)/N
    B.
    """
    found = ranks(2, accounts, "dp2:server", plan="dp2:server")
    total = sum(rank["sent"] for rank in found)
    assert total == 2 * found[0]["numel"] * 4


def test_one_synchronisation_a_step_under_accumulation(ranks: Run) -> None:
    once, thrice = (
        ranks(2, accounts, f"dp2 mb{m}", plan=f"dp2 mb{m}")[0]["ops"]["all_reduce"] for m in (1, 3)
    )
    assert once == thrice == 5  # three blocks, what stands before them, what stands after


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero2", "zero3"])
def test_model_state_equals_the_formula_of_zero(ranks: Run, strategy: str, size: int) -> None:
    """ZeRO, section 3 and figure 1, with float32 throughout: 4 bytes of parameters, 4 of gradients,
    K = 8 of Adam's moments.
    """
    stage = 0 if strategy == "allreduce" else int(strategy[-1])
    for rank in ranks(size, accounts, f"dp{size}:{strategy}", plan=f"dp{size}:{strategy}"):
        numel = rank["numel"]
        held = rank["memory"]
        expected = {
            "parameters": 4 * numel / (size if stage >= 3 else 1),
            "gradients": 4 * numel / (size if stage >= 2 else 1),
            "optimizer": 8 * numel / (size if stage >= 1 else 1),
        }
        for kind, formula in expected.items():
            assert held[kind] == pytest.approx(formula, rel=0.02), (strategy, kind)


def sums(world: World, strategy: str) -> list[float]:
    """Gradients of rank + 1 everywhere; what the optimizer's pieces then hold."""
    model = nn.Linear(3, 5, bias=False)
    axis = world.axis("dp")
    group = DataGroup(axis=axis, shard=axis, replicate=world.axis("dp_replicate"))
    made = data.make(strategy, data.split_units(model, []), group)
    with torch.no_grad():
        made.load(made.states[0], 0, torch.ones(5, 3))
        made.publish()
    made.begin_step()
    made.before_forward()
    output = model(torch.full((1, 3), float(axis.rank + 1)))
    made.after_forward()
    made.before_last_backward()
    output.sum().backward()
    made.after_backward()
    made.reduce()
    return [value for piece in made.pieces for value in piece.value.grad.reshape(-1).tolist()]


@pytest.mark.parametrize("strategy", list(data.STRATEGIES))
def test_no_strategy_divides(ranks: Run, strategy: str) -> None:
    """The loss is normalised in one place, which is not here: a strategy yields the sum,
    exactly.
    """
    found = [value for rank in ranks(4, sums, strategy, plan=f"dp4:{strategy}") for value in rank]
    assert set(found) == {1.0 + 2.0 + 3.0 + 4.0}
