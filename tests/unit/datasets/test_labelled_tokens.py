"""Rows of tokens with labels beside them: what is masked there is not learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import datasets
from plait.datasets.library_set import LibrarySet
from plait.errors import DataError

MODEL = {"name": "llama", "vocab_size": 100}
TOKENS = [5, 6, 7, 8, 9]
LABELS = [-100, -100, 7, 8, -100]
LEARNT = [-100, 7, 8, -100]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        from pyarrow import parquet

        parquet.write_table(table, path)
        return path
    from pyarrow import ipc

    with ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
    return path


def made(path: Path, **keys: Any) -> Any:
    section = {"name": "files", "files": [str(path)], "seq_len": 4, "cache": str(path.parent / "c")}
    return datasets.make({**section, **keys}, MODEL)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".arrow"])
@pytest.mark.parametrize("samples", ["stream", "documents"])
def test_masked_tokens_are_not_learnt(tmp_path: Path, ending: str, samples: str) -> None:
    path = write(tmp_path / f"rows{ending}", [{"labels": LABELS, "input_ids": TOKENS}] * 3)
    for _ in ("made", "kept"):
        found = made(path, samples=samples, keyed_order=True)
        inputs, labels = found.batch(torch.tensor([0]))
        assert inputs.tolist() == [TOKENS[:4]]
        assert labels.tolist() == [LEARNT]


def test_packed_samples_know_the_masks(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"input_ids": TOKENS, "labels": LABELS}] * 2)
    _, labels = made(path, packing=True).batch(torch.tensor([0]))
    assert labels.tolist() == [LEARNT]


def test_a_row_without_masks_learns_all(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"input_ids": TOKENS, "labels": TOKENS}] * 2)
    _, labels = made(path).batch(torch.tensor([0]))
    assert labels.tolist() == [TOKENS[1:]]


def test_a_label_that_is_no_list_is_not_used(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", [{"input_ids": TOKENS, "labels": 1}] * 2)
    _, labels = made(path).batch(torch.tensor([0]))
    assert labels.tolist() == [TOKENS[1:]]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([6, 7, 8, 9, -100], "row 2: the label 6 at 0 is neither -100 nor the token 5"),
        ([-100], "row 2: 1 labels stand beside 5 tokens"),
        (None, "row 2: this is tokens, and the first row is labelled tokens"),
    ],
)
def test_other_labels_are_refused_by_row(tmp_path: Path, labels: Any, sentence: str) -> None:
    rows = [{"input_ids": TOKENS, "labels": each} for each in (LABELS, labels)]
    with pytest.raises(DataError, match=sentence):
        made(write(tmp_path / "rows.jsonl", rows))


class Columns:
    """A set as the library gives it: batches of columns."""

    def with_format(self, form: None) -> Columns:
        return self

    def iter(self, batch_size: int) -> Any:
        yield {"input_ids": [TOKENS], "labels": [LABELS]}


def test_a_set_of_the_library_has_labels_too() -> None:
    (row,) = LibrarySet("set", Columns(), "input_ids", [])
    assert row.learnt == [False, False, True, True, False]
