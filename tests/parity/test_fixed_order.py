"""`train.fixed_order`: any number of data ranks with equal micro-batches ends with equal bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.comm import World
from plait.engine.build import Options, build
from plait.errors import NotAvailable
from plait.models import make as make_model
from plait.models.losses import cross_entropy
from plait.plan import Plan
from plait.plan.fit import check_fixed_order
from tests.helpers.threaded import threaded

SEQ_LEN = 6
SAMPLES = 16
STEPS = 3
MODEL = make_model(
    "gpt",
    num_hidden_layers=2,
    hidden_size=12,
    num_attention_heads=2,
    intermediate_size=20,
    vocab_size=14,
    max_position_embeddings=8,
)

Result = tuple[dict[str, torch.Tensor], list[tuple[float, float]]]


def trained(world: World, plan: str) -> Any:
    options = Options(fixed_order=True, clip_grad_norm=0.5, linear_product="rule")
    engine = build(
        copy.deepcopy(MODEL),
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        world=world,
        options=options,
    )
    seeded = torch.Generator().manual_seed(0)
    rank, size = world.worker
    told = []
    for _ in range(STEPS):
        tokens = torch.randint(14, (SAMPLES, SEQ_LEN + 1), generator=seeded)
        own = tokens[SAMPLES * rank // size : SAMPLES * (rank + 1) // size]
        result = engine.step((own[:, :-1], own[:, 1:]))
        told.append((result.loss, result.grad_norm))
    return engine.local_parameters(), told


def whole(plan: str, run: Callable[..., list[Any]] = threaded) -> Result:
    """The parameters by name, put together of the shards of all ranks; loss and norm by step."""
    ranks = run(Plan.parse(plan).world_size, trained, plan, plan=plan)
    values: dict[str, torch.Tensor] = {}
    for shards, _ in ranks:
        for shard in shards:
            full = values.setdefault(shard.name, torch.full(shard.global_shape, torch.nan))
            part = full[tuple(slice(o, o + e) for o, e in zip(*_place(shard), strict=True))]
            flat = part.reshape(-1)
            flat[shard.start : shard.stop] = shard.values.detach().reshape(-1)
            part.copy_(flat.view(part.shape))
    assert all(told == ranks[0][1] for _, told in ranks)
    return values, ranks[0][1]


def _place(shard: Any) -> tuple[Any, Any]:
    return shard.box.offset, shard.box.extent


def assert_equal(left: Result, right: Result) -> None:
    assert left[1] == right[1]
    assert left[0].keys() == right[0].keys()
    different = [name for name in left[0] if not torch.equal(left[0][name], right[0][name])]
    assert different == []


@pytest.fixture(scope="module")
def one_device() -> Result:
    return whole("dp1 mb8")


@pytest.mark.parametrize(
    "plan",
    ["dp2 mb4", "dp4:ring mb2", "dp8 mb1", "dp2:zero1 mb4", "dp4:zero2 mb2", "dp2:zero3 mb4"],
)
def test_any_number_of_ranks_ends_with_equal_bits(plan: str, one_device: Result) -> None:
    assert_equal(whole(plan), one_device)


@pytest.mark.parametrize("other", ["pp2:1f1b", "tp2"])
def test_other_axes_keep_the_order(other: str, ranks: Callable[..., list[Any]]) -> None:
    # Processes, not threads: threads share one random state, whose draws stages watch.
    assert_equal(whole(f"{other} dp2:zero1 mb2", ranks), whole(f"{other} mb4", ranks))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("dp2:server", "has an order of its own"),
        ("dp4:zero1,replicate2", "has an order of its own"),
        ("cp2 dp2", "leave cp and ep out"),
        ("pp2:zb-h1 mb4", "take 1f1b"),
        ("dp2 mb3", "take mb4"),
    ],
)
def test_what_has_another_order_is_refused(plan: str, why: str) -> None:
    with pytest.raises(NotAvailable, match=why):
        check_fixed_order(Plan.parse(plan))
