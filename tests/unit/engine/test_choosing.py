"""One table for all ranks of a run: measured by one, kept, and fixed where nothing is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.cluster.products import (
    FORWARD,
    RULE,
    TORCH,
    ProductClass,
    ProductTable,
    keep_table,
    read_table,
)
from plait.comm import World
from plait.comm.simulated import simulate
from plait.engine import choosing
from plait.engine.choosing import agreed_table, table_here, write_table_of_run
from plait.errors import PlanError
from plait.mesh import Mesh
from plait.products.measure import Measurement, this_machine

TABLE = ProductTable(frozenset({ProductClass(FORWARD, 16, 1 << 21)}))
FILE = "products.json"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """The outcomes that measuring gives, one after another."""
    outcomes: list[Measurement] = []
    monkeypatch.setattr(choosing, "measure", lambda: outcomes.pop(0))
    return outcomes


def on_ranks(folder: Path | None, choice: Any = "measured", **keywords: Any) -> list[ProductTable]:
    def ask(world: World) -> ProductTable:
        world.measurements = folder
        return agreed_table(choice, world, **keywords)

    return simulate(Mesh(dp=3), ask)


def test_one_rank_measures_and_all_take_its_table(
    tmp_path: Path, measured: list[Measurement]
) -> None:
    measured.append(Measurement(TABLE, True, 0.1))
    assert on_ranks(tmp_path) == [TABLE] * 3
    assert not measured
    assert on_ranks(tmp_path) == [TABLE] * 3  # kept: there is no second outcome


def test_a_busy_machine_keeps_nothing(tmp_path: Path, measured: list[Measurement]) -> None:
    measured += [Measurement(TORCH, False, 0.1), Measurement(TABLE, True, 0.1)]
    assert on_ranks(tmp_path) == [TORCH] * 3
    assert not (tmp_path / FILE).exists()
    assert on_ranks(tmp_path) == [TABLE] * 3


def test_measuring_anew_on_a_busy_machine_leaves_what_is_kept(
    tmp_path: Path, measured: list[Measurement]
) -> None:
    keep_table(tmp_path / FILE, this_machine(), TABLE)
    measured += [Measurement(TORCH, False, 0.1), Measurement(RULE, True, 0.1)]
    assert table_here(tmp_path, remeasure=True) == TABLE
    assert table_here(tmp_path, remeasure=True) == RULE
    assert read_table(tmp_path / FILE, this_machine()) == RULE


def test_nothing_is_measured_where_it_cannot_matter(tmp_path: Path) -> None:
    """Measuring would fail: there is no outcome."""
    assert on_ranks(None) == [RULE] * 3
    assert on_ranks(tmp_path, "rule") == [RULE] * 3
    assert on_ranks(tmp_path, "torch") == [TORCH] * 3
    assert on_ranks(tmp_path, TABLE) == [TABLE] * 3
    assert on_ranks(tmp_path, compute=torch.bfloat16) == [TORCH] * 3
    assert table_here(tmp_path, may_measure=False) == TORCH
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_with_the_table_that_it_began_with(
    tmp_path: Path, measured: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_table(tmp_path / FILE, this_machine(), RULE)
    run_file = tmp_path / "run.json"
    assert on_ranks(tmp_path, run_file=run_file) == [RULE] * 3
    write_table_of_run(run_file, TABLE)
    assert on_ranks(tmp_path, run_file=run_file) == [TABLE] * 3
    other = replace(this_machine(), processor="another")
    monkeypatch.setattr(choosing, "this_machine", lambda: other)
    measured.append(Measurement(TORCH, True, 0.1))
    assert on_ranks(tmp_path, run_file=run_file) == [TORCH] * 3


def test_an_unknown_word_is_refused_on_every_rank() -> None:
    with pytest.raises(PlanError, match="linear_product 'mkl' is unknown"):
        on_ranks(None, "mkl")


def ask(world: World, folder: str) -> bool:
    """Whether this rank got the table that rank 0 alone finds kept."""
    own = Path(folder) / str(world.rank)
    if world.rank == 0:
        keep_table(own / FILE, this_machine(), TABLE)
    world.measurements = own
    return agreed_table("measured", world) == TABLE and own.exists() == (world.rank == 0)


def test_real_ranks_take_the_first_ones_table(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    assert ranks(2, ask, str(tmp_path)) == [True, True]
