"""Every axis and data strategy in every loop: the losses of one device, or one clear sentence.

A new row in `plait.plan.facts` comes under test by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from plait.comm import World
from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.axes import CONTEXT_STRATEGIES, TENSOR_MODES
from plait.plan.facts import DATA_STRATEGIES, PIPELINE_SCHEDULES, SCHEDULES, STRATEGIES
from tests.loops.five_loops import LOOPS, PACKAGES, STEPS, losses
from tests.loops.test_transformers import TOLERANCE

pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # what the libraries say of their own
]

OPTIONS: Final = {"stale": ",stale1", "every": ",every2"}
TENSOR: Final = {"2d": "tp4:2d", "2.5d": "tp8:2.5d,depth2", "3d": "tp8:3d"}
MIXED: Final = (
    "pp2 tp2 dp2:zero1",
    "pp2:interleaved,v2 dp2:zero2 mb4",
    "tp4:2d dp2:zero3",
    "cp2:ring tp2",
    "cp2:ring tp2:1d,sp",
    "pp2 cp2:ulysses mb2",
    "dp4:zero3,replicate2",
    "dp2:zero1,offload",
    "dp2 remat:full",
)


def data_plans() -> list[str]:
    """One plan for each data strategy."""
    found = []
    for name in DATA_STRATEGIES:
        needed = [text for word, text in OPTIONS.items() if word in STRATEGIES[name].options]
        found.append(f"dp2:{name}{''.join(needed)}")
    return found


def pipeline_plans() -> list[str]:
    """One plan for each schedule, with as many micro-batches as it needs."""
    return [
        f"pp2:{name}{',v2' if SCHEDULES[name].needs_virtual else ''} mb4"
        for name in PIPELINE_SCHEDULES
    ]


def tensor_plans() -> list[str]:
    """One plan for each tensor mode, and sequence parallelism."""
    return [TENSOR.get(mode, "tp2") for mode in TENSOR_MODES] + ["tp2:1d,sp"]


PLANS: Final = (
    *data_plans(),
    *tensor_plans(),
    *pipeline_plans(),
    *(f"cp2:{name}" for name in CONTEXT_STRATEGIES),
    *MIXED,
)
EXPERTS: Final = ("dp2 ep2", "pp2 dp2:zero1 ep2 mb2")


def refusal_of(plan: str) -> str:
    """The axis that these loops cannot have, as their refusal names it; else nothing."""
    parsed = Plan.parse(plan)
    if not STRATEGIES[parsed.dp.strategy].synchronous:
        return f"dp with '{parsed.dp.strategy}' updates inside its step"
    if SCHEDULES[parsed.pp.schedule].asynchronous and parsed.pp.size > 1:
        return f"pp with '{parsed.pp.schedule}' updates inside its step"
    if parsed.tp.sequence_parallel and parsed.cp.size > 1:
        return "tp2:1d,sp gives each rank a part of what comes to the blocks"
    return ""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[float]]:
    """The losses of a loop of the library alone, on one device."""
    known: dict[tuple[str, str], list[float]] = {}

    def found(loop: str, family: str) -> list[float]:
        if (loop, family) not in known:
            out = str(tmp_path_factory.mktemp(loop))
            known[loop, family] = losses(None, loop, "", family, out)
        return known[loop, family]

    return found


def refused(world: World, loop: str, plan: str, family: str, out: str) -> str:
    with pytest.raises(PlanError) as raised:
        losses(world, loop, plan, family, out)
    return str(raised.value)


@pytest.mark.parametrize("plan", [*PLANS, *EXPERTS])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_as_one_device_does_or_says_why_not(
    loop: str,
    plan: str,
    ranks: Callable[..., list[Any]],
    alone: Callable[[str, str], list[float]],
    tmp_path: Path,
) -> None:
    for package in PACKAGES[loop]:
        pytest.importorskip(package)
    size = Plan.parse(plan).world_size
    family = "mixtral" if plan in EXPERTS else "gpt2"
    words = (loop, plan, family, str(tmp_path))
    sentence = refusal_of(plan)
    if sentence:
        for told in ranks(size, refused, *words, plan=plan):
            assert sentence in told
            assert "\n" not in told
        return
    wanted = alone(loop, family)
    assert len(set(wanted)) == STEPS
    for found in ranks(size, losses, *words, plan=plan):
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(wanted), rtol=TOLERANCE, atol=0.0
        )


def test_every_schedule_and_strategy_is_here() -> None:
    named = {Plan.parse(plan).dp.strategy for plan in PLANS}
    assert named == set(DATA_STRATEGIES)
    assert {Plan.parse(plan).pp.schedule for plan in PLANS if "pp" in plan} == set(
        PIPELINE_SCHEDULES
    )
    assert {Plan.parse(plan).tp.mode for plan in PLANS} == set(TENSOR_MODES)
