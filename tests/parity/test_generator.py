"""A fixed table of 100 random cells, up to 8 ranks; that the table is fixed; that a planted fault
shrinks to what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.comm import World
from plait.engine.stages.tied import TiedSum
from plait.plan import Plan
from tests.parity.generator import run
from tests.parity.generator.cell import Cell
from tests.parity.generator.draw import cells, draw, valid
from tests.parity.generator.report import Row, report
from tests.parity.generator.run import Verdict, judge
from tests.parity.generator.shrink import shrink

Run = Callable[..., list[Any]]
TABLE = list(cells(100, seed=0))


@pytest.mark.parametrize(
    "number", range(100), ids=lambda number: f"{number}: {TABLE[number].kind} {TABLE[number].plan}"
)
def test_equals_one_device(ranks: Run, number: int) -> None:
    """Refused is as good as equal here: a plan that does not fit its model must say so, alike on
    every rank.
    """
    verdict = judge(ranks, TABLE[number])
    assert verdict.status != "failed", (str(TABLE[number]), verdict)


def test_the_table_covers_every_axis_and_pairs_of_them() -> None:
    plans = [Plan.parse(cell.plan) for cell in TABLE]
    sizes = [
        {"pp": p.pp.size > 1, "tp": p.tp.size > 1, "cp": p.cp.size > 1, "dp": p.dp.size > 1}
        for p in plans
    ]
    for one in sizes[0]:
        for other in sizes[0]:
            assert any(size[one] and size[other] for size in sizes), (one, other)
    assert max(plan.world_size for plan in plans) == 8
    assert {cell.kind for cell in TABLE} == {"mlp", "odd", "gpt", "llama", "moe", "resnet"}


@settings(max_examples=50, derandomize=True, database=None)
@given(st.data())
def test_what_is_drawn_is_valid_and_is_its_text(data: st.DataObject) -> None:
    """The same drawing under a property tester, which shrinks what it draws."""
    cell = draw(lambda options: data.draw(st.sampled_from(list(options))))
    if cell is None:
        return
    assert valid(cell)
    assert Cell.parse(str(cell)) == cell
    assert cell.world_size <= 8


def test_a_cell_depends_on_seed_and_number_alone() -> None:
    assert list(cells(3, seed=4, start=7)) == list(cells(10, seed=4))[7:]


def without_tied_sum(world: World, cell: Cell) -> Any:
    """The planted fault: copies of a tied weight on several stages keep their own gradients."""
    kept = TiedSum.sum
    TiedSum.sum = lambda self: None  # type: ignore[method-assign]
    try:
        return run.on_rank(world, cell)
    finally:
        TiedSum.sum = kept  # type: ignore[method-assign]


def test_a_planted_fault_shrinks_to_the_smallest_plan(ranks: Run) -> None:
    keys = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 6,
        "vocab_size": 22,
        "max_position_embeddings": 4,
        "tie_word_embeddings": True,
    }
    plan = "pp2:zbv tp2 mb4 remat:full precision:float64"
    cell = Cell(plan, "gpt", keys, 12, 4, clip=0.05, frozen=("blocks.0.attention.*.*",))

    def fails(candidate: Cell) -> bool:
        def faulty(n: int, fn: Any, *args: Any, **options: Any) -> list[Any]:
            return ranks(n, without_tied_sum, *args, **options)

        return judge(faulty, candidate).status == "failed"

    assert fails(cell)
    smallest = shrink(cell, fails)
    assert smallest.plan == "pp2:gpipe mb1 precision:float64"
    assert (smallest.clip, smallest.frozen) == (None, ())
    assert smallest.keys["tie_word_embeddings"] and smallest.keys["num_hidden_layers"] == 1


def test_a_report_tells_what_ran_what_was_refused_and_what_failed() -> None:
    verdicts = [
        Verdict("ok", 2e-13, "grad", "w"),
        Verdict("refused", message="no"),
        Verdict("failed", 3.0, "loss", "step 0"),
    ]
    rows = [Row(n, 0, TABLE[n], verdict, TABLE[n]) for n, verdict in enumerate(verdicts)]
    text = report(rows, 5, 0)
    for expected in (
        "| drawn (seed 0) | 3 of 5 |",
        "| failed | 1 |",
        "- 1 x no",
        "loss 3.0e+00",
        "Largest relative error: 3.0e+00",
    ):
        assert expected in text
