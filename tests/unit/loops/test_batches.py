"""Parts of the batches that a loop of another library makes whole."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait import SampleList
from plait.loops.batches import PartOfBatch


def parts(batch: Any) -> list[Any]:
    return [PartOfBatch(lambda _: batch, rank, 2)([]) for rank in range(2)]


def test_texts_and_lists_of_samples_are_divided_with_the_tensors() -> None:
    batch = {"rows": torch.arange(3), "texts": ["a", "b", "c"], "images": SampleList("xyz")}
    found = [(one["rows"].tolist(), one["texts"], one["images"]) for one in parts(batch)]
    assert found == [([0], ["a"], ["x"]), ([1, 2], ["b", "c"], ["y", "z"])]
    assert all(isinstance(one["images"], SampleList) for one in parts(batch))


@pytest.mark.parametrize("kind", [UserDict, SimpleNamespace])
def test_tensors_of_mappings_and_objects_are_divided(kind: Any) -> None:
    found = parts(kind(rows=torch.arange(4), scale=torch.tensor(2.0)))
    rows = [one["rows"] if isinstance(one, UserDict) else one.rows for one in found]
    assert [one.tolist() for one in rows] == [[0, 1], [2, 3]]
