"""The table of products as `plait probe` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from plait.cli.probe import _parts, _products
from plait.cluster import Cluster
from plait.cluster.products import (
    CLASSES,
    FILE_NAME,
    FORWARD,
    RULE,
    TORCH,
    ProductTable,
    keep_table,
)
from plait.products.measure import this_machine
from tests.unit.predict.cost.test_processor import HOST, PROBE


def text_of(parts: list[RenderableType]) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get().splitlines()


def probe(table: ProductTable) -> dict[str, Any]:
    return {"host": {"products": table.as_dict()}}


def test_every_class_has_its_library_and_ratio_within_80_columns() -> None:
    forward = frozenset(one for one in CLASSES if one.kind == FORWARD)
    lines = text_of(
        _parts(
            probe(ProductTable(forward, dict.fromkeys(CLASSES, (0.7, 0.8, 0.9)))), "host", _products
        )
    )
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines[-9:]]
    assert rows[0] == ["16", "2", "oneDNN", "0.80", "torch", "0.80", "torch", "0.80"]
    assert {tuple(row[2::2]) for row in rows} == {("oneDNN", "torch", "torch")}


def test_a_busy_machine_is_said_and_a_gpu_has_no_table() -> None:
    assert "the machine was busy" in " ".join(text_of(_products(probe(TORCH)["host"])))
    assert _parts({}, "host", _products) == []


def test_a_table_that_is_measured_after_a_busy_probe_is_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    host = {name: part for name, part in HOST.items() if name != "products"}
    busy = {**PROBE, "host": {**host, "machine": str(this_machine())}}
    assert _table_of(busy) == TORCH
    assert "the machine was busy" in " ".join(text_of(_products(busy["host"])))
    keep_table(tmp_path / ".cache" / "plait" / FILE_NAME, this_machine(), RULE)
    assert _table_of(busy) == RULE
    assert _table_of({**busy, "host": {**host, "machine": "another"}}) == TORCH


def _table_of(probe: dict[str, Any]) -> ProductTable:
    found = Cluster.local(probe).profile
    assert found is not None
    return found.products
