"""`keep_gathered`: blocks that zero3 keeps whole equal one device, and save the predicted bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.comm import World
from plait.errors import PlanError
from plait.parallel.data.sharded_unit import UnitState
from plait.parallel.data.zero3 import Zero3
from tests.helpers.threaded import threaded
from tests.parity import families, harness
from tests.parity.harness import TOLERANCE, check

Run = Callable[..., list[Any]]
DEEP = families.DEEP["gpt-deep"]


@pytest.mark.parametrize(
    "plan",
    [
        "dp2:zero3",
        "dp2:zero3 mb2 remat:full",
        "dp4:zero3,replicate2 mb2 remat:selective",
        "dp2:zero3 pp2:1f1b mb4",
        "dp2:zero3 pp2:interleaved,v2 mb4 remat:full",
        "dp2:zero3 pp2:zb-h1 mb4",
    ],
)
@pytest.mark.parametrize("keep", [2, (0, 3), 4], ids=str)
def test_equals_one_device(ranks: Run, plan: str, keep: Any) -> None:
    outcome = check(ranks, f"{plan} precision:float64", DEEP, keep_gathered=keep)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    ("plan", "family", "samples"),
    [
        ("tp2 dp2:zero3 mb2", "split-llama", 12),
        ("cp2 dp2:zero3", "split-llama", 12),
        ("dp2:zero3 ep2 mb2", "deepseek-balanced", 5),
    ],
)
def test_split_layers_and_experts_equal_one_device(
    ranks: Run, plan: str, family: str, samples: int
) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, samples, keep_gathered=1)
    assert outcome.largest <= TOLERANCE, outcome


def trained(world: World, text: str, keep: Any) -> tuple[list[Any], list[str]]:
    """What a rank has after each step, and the states of its blocks after a forward."""
    engine = harness.make_engine(world, text, DEEP, {"keep_gathered": keep})
    strategy = engine.strategy
    assert isinstance(strategy, Zero3)
    seen: list[str] = []
    ended = strategy.after_forward

    def after_forward() -> None:
        ended()
        seen[:] = [unit.state.value for unit in strategy._units if unit.unit.is_block]

    strategy.after_forward = after_forward  # type: ignore[method-assign]
    found = harness.train(engine, DEEP, 12)
    assert all(unit.state is UnitState.SHARDED for unit in strategy._units)
    return found, seen


@pytest.mark.parametrize("text", ["dp2:zero3 mb3", "dp2:zero3 mb2 remat:full"])
def test_kept_blocks_stay_and_no_bit_changes(text: str) -> None:
    plain, none = threaded(2, trained, text, None, plan=text)[0]
    kept, whole = threaded(2, trained, text, (1, 2), plan=text)[0]
    assert none == ["sharded"] * 4
    assert whole == ["sharded", "taken", "taken", "sharded"]
    for one, other in zip(plain, kept, strict=True):
        assert torch.equal(torch.as_tensor(one[0]), torch.as_tensor(other[0]))
        for left, right in zip(one[3], other[3], strict=True):
            assert left[0] == right[0]
            assert torch.equal(left[3], right[3])


def evaluated(world: World) -> list[str]:
    """The states of all units after a step and an evaluation."""
    engine = harness.make_engine(world, "dp2:zero3", DEEP, {"keep_gathered": 4})
    harness.train(engine, DEEP, 12)
    inputs, targets = next(iter(DEEP.batches(12)))
    engine.evaluate((inputs[:6], targets[:6]))
    strategy = engine.strategy
    assert isinstance(strategy, Zero3)
    return [unit.state.value for unit in strategy._units]


def test_an_evaluation_keeps_nothing() -> None:
    assert set(threaded(2, evaluated, plan="dp2:zero3")[0]) == {"sharded"}


def test_a_build_that_could_not_keep_them_is_refused() -> None:
    def build(world: World, text: str, keep: Any) -> str:
        try:
            harness.make_engine(world, text, DEEP, {"keep_gathered": keep})
        except PlanError as error:
            return str(error)
        return ""

    cases = [("dp2:zero1", 2), ("dp2:zero3", 5), ("dp2:zero3", (4,)), ("dp2:zero3", "auto")]
    found = [threaded(2, build, *case, plan=case[0])[0] for case in cases]
    assert "take dp2:zero3, or leave keep_gathered out" in found[0]
    assert "the model has 4 blocks; give 0 to 4" in found[1]
    assert "has block 4, and the model has 4 blocks; their numbers are 0 to 3" in found[2]
    assert "pass Options(keep_gathered=plait.estimate(config, plan, cluster)" in found[3]
