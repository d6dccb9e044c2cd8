"""Labels that a skewed deal sorts by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.config import Federated
from plait.errors import DataError
from plait.outer.federated.split import split


class Alike:
    """Samples that have one target."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2), self._target


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ({"label": torch.tensor(1)}, "a dict"),
        ("a cat", "a str"),
        (None, "a NoneType"),
        ([[1], [1, 2]], "a list"),
        (torch.zeros(3), r"torch\.float32 of shape \(3,\)"),
    ],
)
@pytest.mark.parametrize("partition", ["dirichlet", "shards"])
def test_a_target_that_is_no_label_is_named(target: object, what: str, partition: Any) -> None:
    section = Federated(clients=2, partition=partition)
    with pytest.raises(DataError, match=rf"target of sample \d+ is {what}; use partition 'iid'"):
        split(Alike(target), section, 0)
    assert len(split(Alike(target), Federated(clients=2), 0).train) == 2
