"""The parity table of mixtures of experts: every router and every axis, auxiliary losses included,
against one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.parallel.expert import Placing
from tests.parity.families import EXPERT_FAMILIES
from tests.parity.harness import TOLERANCE, check

Run = Callable[..., list[Any]]

# Every router of both kinds runs under each of these; the other tables take the routers that differ
# most.
PLANS = ("dp1", "cp2:ulysses mb2", "cp2:ring dp2 ep2", "dp2:zero1 ep2 mb2", "dp4 ep4")
COMPOSED = (
    "dp2 ep2 tp2",
    "dp2 ep2 tp2:1d,sp",
    "cp4:ring",
    "dp4:zero2 ep2",
    "dp4:zero2 ep2 mb2",
    "dp4:zero3 ep2",
    "dp4:zero3,replicate2 ep2",
    "dp4:ring ep2",
    "dp4:server ep2",
    "pp2:1f1b dp2 ep2 mb4",
    "pp2:zb-h1 dp2:zero1 ep2 mb2",
    "pp2:interleaved,v2 dp2 ep2 mb2",
    "cp2:ring tp2 dp2:zero1",
    "cp2:ring tp2 dp2:zero1 ep4",
)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_routers_do_not_know_how_many_ranks_there_are(ranks: Run, family: str) -> None:
    for plan in PLANS:
        outcome = check(ranks, f"{plan} precision:float64", family, 5)
        assert outcome.largest <= TOLERANCE, (plan, outcome)


@pytest.mark.parametrize("family", ["mixtral-balanced", "deepseek-bias", "deepseek-drop"])
@pytest.mark.parametrize("plan", COMPOSED)
def test_composes(ranks: Run, plan: str, family: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, 5)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "plan", ["dp2 ep2", "dp2:zero1 ep2 mb2", "dp4:zero3 ep2", "cp2:ring ep2", "dp2 ep2 tp2"]
)
def test_clipping_counts_every_expert_once(ranks: Run, plan: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", "deepseek-balanced", 5, clip_grad_norm=0.05)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("remat", ["selective", "full"])
@pytest.mark.parametrize("plan", ["dp2 ep2 mb2", "dp2:zero3 ep2 mb2", "dp4:zero3 ep2"])
def test_recomputes(ranks: Run, plan: str, remat: str) -> None:
    outcome = check(ranks, f"{plan} remat:{remat} precision:float64", "deepseek-balanced", 5)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("family", ["hf-mixtral-default", "hf-qwen2-moe"])
@pytest.mark.parametrize(
    "plan", ["dp2:zero3 mb2", "dp4:zero2 ep2", "pp2:1f1b dp2:zero1 ep2 mb2", "dp2 ep2 tp2"]
)
def test_mixtures_of_hugging_face(ranks: Run, plan: str, family: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, 5)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("num_samples", [1, 2, 3])
@pytest.mark.parametrize("plan", ["dp4 ep4", "dp4:zero3 ep2 mb2"])
def test_ranks_without_a_sample_count_nothing(ranks: Run, plan: str, num_samples: int) -> None:
    outcome = check(ranks, f"{plan} precision:float64", "mixtral-balanced", num_samples)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("family", ["mixtral-balanced", "deepseek-bias"])
@pytest.mark.parametrize(
    "plan",
    [
        "dp2 ep2 mb2",
        "dp4:zero2 ep4",
        "dp4:zero3 ep2",
        "dp2 ep2 tp2",
        "pp2:zb-h1 dp2:zero1 ep2 mb2",
        "dp4 ep4 remat:full",
    ],
)
def test_experts_that_are_placed_anew_every_step_compute_the_same(
    ranks: Run, plan: str, family: str
) -> None:
    options = {"placing": Placing(every=1, spare_slots=1, gain=0.0), "clip_grad_norm": 0.05}
    outcome = check(ranks, f"{plan} precision:float64", family, 5, **options)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", ["dp4 ep4", "dp4:zero3 ep4 mb2", "cp2:ring dp2:zero1 ep4"])
def test_two_hops_between_nodes_compute_the_same(ranks: Run, plan: str) -> None:
    for placing in (Placing(), Placing(every=1, spare_slots=1, gain=0.0)):
        outcome = check(
            ranks, f"{plan} precision:float64", "deepseek-balanced", 5, node=2, placing=placing
        )
        assert outcome.largest <= TOLERANCE, outcome
