"""What real models have and compositions trip over, each under products of axes: a weight used
twice, a module that every block calls, weights tied across stages, replicated layers inside sharded
ones, frozen parameters, buffers, unused modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from plait.comm import World
from plait.plan import Plan
from tests.parity import families, harness
from tests.parity.generator.cell import Cell
from tests.parity.generator.run import judge
from tests.parity.harness import TOLERANCE, check

Run = Callable[..., list[Any]]
PLANS = [
    "pp2:1f1b tp2 dp2:zero1 mb4",
    "tp2 dp2:zero3 mb2",
    "pp2:zbv dp2:zero3 mb2",
    "pp2:interleaved,v2 tp2 mb2 remat:full",
]
ODD = {
    "in_features": 6,
    "hidden_size": 10,
    "intermediate_size": 8,
    "out_features": 5,
    "num_hidden_layers": 3,
}
FROZEN = {
    "nothing frozen": (),
    "the shared module frozen": ("shared.*",),
    "half of a block frozen": ("blocks.0.up.*", "blocks.1.norm.weight", "embed.weight"),
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_shared_tied_twice_used_and_unused(
    ranks: Run, plan: str, tied: bool, frozen: tuple[str, ...]
) -> None:
    verdict = judge(
        ranks,
        Cell(
            f"{plan} precision:float64", "odd", {**ODD, "tied": tied}, 7, clip=0.05, frozen=frozen
        ),
    )
    assert verdict.status == "ok", verdict


@pytest.mark.parametrize(
    "plan", ["pp2:zbv tp2 mb2", "pp2:v-half dp2:zero3 mb2", "pp2:1f1b tp2 dp2 mb2"]
)
def test_a_tied_embedding_that_is_frozen(ranks: Run, plan: str) -> None:
    """On two stages of one rank, or of two: it has its values on both, and moves on neither."""
    family = families.SPLIT_FAMILIES["gpt"]
    outcome = check(ranks, f"{plan} precision:float64", replace(family, frozen=("embed.weight",)))
    assert outcome.largest <= TOLERANCE, outcome


def unused_are_left_alone(world: World, plan: str) -> list[str]:
    cell = Cell(f"{plan} precision:float64", "odd", {**ODD, "tied": True}, 7)
    engine = harness.make_engine(world, cell.plan, cell.family, cell.options)
    before = {part.name: part.values.clone() for part in engine.local_parameters()}
    harness.train(engine, cell.family, cell.num_samples)
    assert all(buffer.device == world.device for buffer in engine.holding.buffers().values())
    return sorted(
        {
            part.name
            for part in engine.local_parameters()
            if bool((part.values == before[part.name]).all())
        }
    )


@pytest.mark.parametrize("plan", ["pp2:1f1b tp2 mb2", "tp2 dp2:zero3"])
def test_a_module_that_no_step_uses_does_not_move(ranks: Run, plan: str) -> None:
    """Not even by weight decay: the optimizer is given no gradient for it."""
    found = ranks(Plan.parse(plan).world_size, unused_are_left_alone, plan, plan=plan)
    unmoved = {name for names in found for name in names}
    assert {name for name in unmoved if not name.startswith("idle")} == set()
    assert unmoved >= {"idle.weight"}
