"""The table of products: what it says of a size, and the file that keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.cluster.products import (
    CLASSES,
    KINDS,
    RULE,
    TORCH,
    WEIGHT_GRAD,
    ProductClass,
    ProductConditions,
    ProductTable,
    keep_table,
    processor_name,
    read_table,
)
from plait.errors import ClusterError

ONE = ProductClass(WEIGHT_GRAD, 128, 1 << 23)
TABLE = ProductTable(frozenset({ONE}), {ONE: (0.7, 0.75, 0.8)})
MACHINE = ProductConditions("some processor", "2.13.0", 1)


@pytest.mark.parametrize(
    ("rows", "multiplications", "kinds"),
    [
        (128, 1 << 23, {WEIGHT_GRAD}),
        (1023, (1 << 26) - 1, {WEIGHT_GRAD}),
        (1024, 1 << 23, set()),
        (127, 1 << 23, set()),
        (128, (1 << 23) - 1, set()),
        (128, 1 << 26, set()),
    ],
)
def test_a_class_holds_for_its_ranges(rows: int, multiplications: int, kinds: set[str]) -> None:
    assert TABLE.kinds(rows, multiplications) == kinds


def test_fixed_tables_are_all_or_nothing() -> None:
    for one in CLASSES:
        assert RULE.kinds(one.rows, one.multiplications) == set(KINDS)
        assert not TORCH.kinds(one.rows, one.multiplications)
    assert not RULE.kinds(15, 1 << 30)
    assert not RULE.kinds(1 << 20, (1 << 21) - 1)


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "products.json"
    other = ProductConditions("some processor", "2.13.0", 2)
    assert read_table(path, MACHINE) is None
    keep_table(path, MACHINE, TABLE)
    keep_table(path, other, RULE)
    found = read_table(path, MACHINE)
    assert found == TABLE
    assert found is not None
    assert found.ratios == TABLE.ratios
    assert read_table(path, other) == RULE
    assert read_table(path, ProductConditions("another", "2.13.0", 1)) is None
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 1, "tables": 5}', "\0"])
def test_a_damaged_file_is_no_table_and_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "products.json"
    path.write_text(text)
    assert read_table(path, MACHINE) is None
    keep_table(path, MACHINE, TABLE)
    assert read_table(path, MACHINE) == TABLE


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    keep_table(tmp_path / "file" / "products.json", MACHINE, TABLE)


@pytest.mark.parametrize(
    "change",
    [
        {"forward/16/2097152": {"library": "mkl"}},
        {"forward/16/2097152": "torch"},
        {"forward/16/2097152": {"library": "torch", "ratio": [1.0, -1.0, 2.0]}},
        {"forward/1/1": {"library": "torch"}},
    ],
)
def test_a_wrong_table_is_refused(change: dict[str, Any]) -> None:
    given = json.loads(json.dumps(TABLE.as_dict())) | change
    with pytest.raises(ClusterError, match="run plait probe again"):
        ProductTable.from_dict(given)


def test_the_processor_has_a_name() -> None:
    assert processor_name()
