"""The table of products as `plait probe` shows it."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType

from plait.cli.probe import _products
from plait.cluster.products import CLASSES, FORWARD, TORCH, ProductTable


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
        _products(probe(ProductTable(forward, dict.fromkeys(CLASSES, (0.7, 0.8, 0.9)))))
    )
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines[-9:]]
    assert rows[0] == ["16", "2", "oneDNN", "0.80", "torch", "0.80", "torch", "0.80"]
    assert {tuple(row[2::2]) for row in rows} == {("oneDNN", "torch", "torch")}


def test_a_busy_machine_is_said_and_a_gpu_has_no_table() -> None:
    assert "the machine was busy" in " ".join(text_of(_products(probe(TORCH))))
    assert _products({}) == []
