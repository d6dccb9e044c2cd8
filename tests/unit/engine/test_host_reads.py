"""In a step the host reads nothing of its device, where that decides on the step.

On an accelerator each read waits for all that was queued. What is counted here on processors is the
code that runs there too. Where the host decides, it reads once, after the last backward. Experts
are read once more a layer.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from plait.comm import World
from plait.engine.build import build
from plait.engine.loss import LossSum, summed
from plait.engine.options import Options
from plait.models.losses import cross_entropy
from plait.plan import Plan, facts
from tests.helpers.host_reads import HostReads, Place
from tests.helpers.threaded import threaded
from tests.parity.families import family_of

TOTALS = ("engine/sums.py", "read", "tolist")
OF_THE_STEP_BEFORE = ("engine/sums.py", "_arrived", "tolist")
"""The copy on the host of sums that an earlier step has sent."""
COUNTS = ("parallel/expert/route.py", "_read", "tolist")
ON_PROCESSORS_ALONE = {("parallel/tensor/vocabulary.py", "<genexpr>", "__int__")}
"""Checks of numbers that accelerators leave out."""
LOADS = ("engine/balance.py", "after_update", "tolist")
DENSE = [
    *("dp1", "dp2", "dp2:ring mb2", "dp2:server", "dp2:zero1", "dp2:zero2 mb2"),
    *("dp2:zero3 remat:full", "dp4:zero3,replicate2", "dp2 precision:bf16 remat:selective"),
    *("tp2", "tp2:1d,sp dp2:zero3", "tp4:2d", "tp8:2.5d,depth2", "tp8:3d"),
    *("pp2:1f1b mb2", "pp2:zb-h1 tp2 mb2", "pp2:interleaved,v2 mb2"),
]
SCHEDULES = [name for name, own in facts.SCHEDULES.items() if not own.asynchronous]
OTHER_SCHEDULES = [f"pp2:{name} mb4" for name in SCHEDULES if name != "interleaved"]


def reads(world: World, plan: str, name: str, later: bool) -> Counter[Place]:
    """Reads of the third step, when all that is made once is there."""
    family = family_of(name)
    engine = build(
        family.model(),
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        options=Options(clip_grad_norm=1.0, defer_reads=later),
        world=world,
    )
    axis = world.axis("dp")
    first, second, *_ = (
        tuple(part.tensor_split(axis.size)[axis.rank] for part in batch)
        for batch in family.batches(8)
    )
    for _ in range(2):  # both look at what forwards write
        engine.step(first, trace=False)
    with HostReads() as found:
        engine.step(second, trace=False)
    return found.places


def most(plan: str, name: str, *, later: bool = False) -> Counter[Place]:
    """The most of any rank, without what runs on processors alone."""
    found: Counter[Place] = Counter()
    for own in threaded(Plan.parse(plan).world_size, reads, plan, name, later, plan=plan):
        found |= own
    return Counter({place: n for place, n in found.items() if place not in ON_PROCESSORS_ALONE})


DECIDED = pytest.mark.parametrize(
    ("later", "wanted"),
    [(False, {TOTALS: 1}), (True, {OF_THE_STEP_BEFORE: 1})],
    ids=["host", "device"],
)


@DECIDED
@pytest.mark.parametrize("plan", DENSE)
def test_the_host_reads_nothing_or_once_a_step(
    plan: str, later: bool, wanted: dict[Place, int]
) -> None:
    name = "gpt-deep" if "interleaved" in plan else "split-gpt"
    assert most(plan, name, later=later) == wanted


@pytest.mark.long
@DECIDED
@pytest.mark.parametrize("plan", OTHER_SCHEDULES)
def test_nor_more_often_under_any_schedule(
    plan: str, later: bool, wanted: dict[Place, int]
) -> None:
    assert most(plan, "gpt-deep", later=later) == wanted


@DECIDED
@pytest.mark.parametrize("plan", ["cp2:ring", "cp2:ulysses"])
def test_nor_more_often_where_sequences_are_cut(
    plan: str, later: bool, wanted: dict[Place, int]
) -> None:
    assert most(plan, "long-gpt", later=later) == wanted


@pytest.mark.parametrize(
    ("later", "wanted"),
    [(False, {TOTALS: 1, LOADS: 1}), (True, {OF_THE_STEP_BEFORE: 1})],
    ids=["host", "device"],
)
@pytest.mark.parametrize(("plan", "micro_batches"), [("dp2:zero1 ep2", 1), ("dp2 ep2 mb2", 2)])
@pytest.mark.parametrize("name", ["mixtral-plain", "mixtral-balanced"])
def test_experts_read_their_counts_once_a_layer(
    name: str, plan: str, micro_batches: int, later: bool, wanted: dict[Place, int]
) -> None:
    layers = family_of(name).keys["num_hidden_layers"]
    assert most(plan, name, later=later) == {**wanted, COUNTS: layers * micro_batches}


def test_a_read_is_seen() -> None:
    part = LossSum(torch.device("cpu"))
    with HostReads() as found:
        summed([part], 1, [])
    assert found.places == {("engine/loss.py", "summed", "tolist"): 1}
