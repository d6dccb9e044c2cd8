"""Local SGD and DiLoCo on real ranks, against N models trained one after the other on one
device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm import World
from plait.engine.build import Options, build
from plait.models import losses
from plait.outer import Asynchrony
from plait.outer.compression import Int8Sum
from plait.verify.record.compare import largest, relative_error
from tests.parity.families import FAMILIES, Family
from tests.parity.harness import SEED, TOLERANCE, check, join
from tests.parity.replay import Outer, local_rounds

Run = Callable[..., list[Any]]
STEPS = 7  # rounds of 3, 3 and 1: the last one is ended early


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-6)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def shares(family: Family, size: int, num_samples: int = 9) -> list[list[tuple[Tensor, Tensor]]]:
    """By rank and step. Tokens are masked unevenly, so that ranks weigh differently."""
    generator = torch.Generator().manual_seed(11)
    batches = [family._batch(num_samples, generator) for _ in range(STEPS)]
    return [
        [(x.tensor_split(size)[r], y.tensor_split(size)[r]) for x, y in batches]
        for r in range(size)
    ]


def train(world: World, plan: str, family_name: str, asynchrony: Asynchrony, optimizer: Any) -> Any:
    family = FAMILIES[family_name]
    axis = world.axis("dp")
    engine = build(
        family.model(),
        plan,
        loss=losses.cross_entropy,
        optimizer=optimizer,
        options=Options(seed=SEED, asynchrony=asynchrony),
        world=world,
    )
    results = [engine.step(batch, trace=False) for batch in shares(family, axis.size)[axis.rank]]
    engine.driver.synchronize()
    parts = [
        (p.name, p.global_shape, p.index(), p.values.clone()) for p in engine.local_parameters()
    ]
    return parts, [(r.loss, r.tokens, r.ledger.by_axis(), r.details) for r in results]


def error(results: list[Any], expected: dict[str, Tensor]) -> float:
    params = join([parts for parts, _ in results])
    return max(
        relative_error(params[n].view_as(v), v, largest(expected)) for n, v in expected.items()
    )


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("outer", [Outer(3), Outer(3, 0.7, 0.9), Outer(1, 0.7, 0.9)])
@pytest.mark.parametrize(("family", "size"), [("gpt", 2), ("mlp", 4)])
def test_equals_ranks_trained_one_after_the_other(
    ranks: Run, family: str, size: int, outer: Outer, optimizer: Any
) -> None:
    asynchrony = Asynchrony(outer_lr=outer.lr, outer_momentum=outer.momentum)
    plan = f"dp{size}:local,every{outer.every} precision:float64"
    results = ranks(size, train, plan, family, asynchrony, optimizer, plan=plan)
    expected = local_rounds(FAMILIES[family], shares(FAMILIES[family], size), outer, optimizer)[-1]
    assert error(results, expected) <= TOLERANCE


def test_every_step_and_plain_averaging_is_all_reduce(ranks: Run) -> None:
    """The masks weigh the ranks differently, and a mean of means would be far off."""
    local = ranks(2, train, "dp2:local,every1 precision:float64", "gpt", Asynchrony(), plain_sgd)
    together = ranks(2, train, "dp2 precision:float64", "gpt", Asynchrony(), plain_sgd)
    assert error(local, join([parts for parts, _ in together])) <= TOLERANCE
    for (loss, tokens, *_), (other, others, *_) in zip(local[0][1], together[0][1], strict=True):
        assert abs(loss - other) <= TOLERANCE * abs(other)
        assert tokens == others


def test_sends_nothing_between_outer_steps_and_there_what_an_all_reduce_sends(ranks: Run) -> None:
    local = ranks(2, train, "dp2:local,every3 precision:float64", "mlp", Asynchrony(), sgd)
    together = ranks(2, train, "dp2 precision:float64", "mlp", Asynchrony(), sgd)
    whole = together[0][1][0][2]["dp"]
    sent = [ledger.get("dp", 0) for _, _, ledger, _ in local[0][1]]
    assert sent == [0, 0, whole, 0, 0, whole, 0]
    assert [details["outer_step"] for *_, details in local[0][1]] == [0, 0, 1, 0, 0, 1, 0]


def test_tokens_that_results_tell_add_up(ranks: Run) -> None:
    local = ranks(2, train, "dp2:local,every3 precision:float64", "gpt", Asynchrony(), sgd)
    everything = shares(FAMILIES["gpt"], 2)
    expected = sum(int((y != -100).sum()) for rank in everything for _, y in rank[:6])
    for _, seen in local:
        assert sum(tokens for _, tokens, *_ in seen[:6]) == expected


def test_eight_bits_send_an_eighth_of_float64_and_train_as_well(ranks: Run) -> None:
    plan = "dp2:local,every1 precision:float64"
    small = ranks(2, train, plan, "gpt", Asynchrony(compress="int8"), plain_sgd)
    exact = ranks(2, train, plan, "gpt", Asynchrony(), plain_sgd)
    join([parts for parts, _ in small])  # equal on all ranks
    assert small[0][1][0][2]["dp"] < 0.16 * exact[0][1][0][2]["dp"]
    assert abs(small[0][1][-1][0] - exact[0][1][-1][0]) < 0.02 * exact[0][1][-1][0]


def residuals(world: World) -> Any:
    """Three sums in eight bits and what they kept back, beside the exact sums."""
    axis = world.axis("dp")
    compressed = Int8Sum(axis, 600 * axis.size, torch.float64, torch.device("cpu"))
    numel = 600 * axis.size
    told = torch.zeros(numel, dtype=torch.float64)
    exact = torch.zeros(numel, dtype=torch.float64)
    for number in range(3):
        own = torch.randn(
            numel,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(10 * number + axis.rank),
        )
        total = own.clone()
        axis.all_reduce(total).wait()
        exact += total
        compressed.sum(own)
        told += own
    missing = compressed.flush()
    return (
        told,
        missing,
        exact,
        float(compressed.worker_error.abs().max() + compressed.shard_error.abs().max()),
    )


def test_what_eight_bits_keep_back_is_made_good_to_the_last_bit_but_rounding(ranks: Run) -> None:
    for told, missing, exact, left in ranks(2, residuals):
        assert float(missing.abs().max()) > 1e-4 and left == 0
        assert torch.allclose(told + missing, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["mlp", "llama"])
def test_a_single_rank_is_one_device(ranks: Run, family: str) -> None:
    outcome = check(ranks, "dp1:local,every2 mb3 precision:float64", family)
    assert outcome.largest <= TOLERANCE, outcome
