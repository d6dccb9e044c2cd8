from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import DataError
from plait.outer.federated.partitions import PARTITIONS, partition

LABELS = [index % 10 for index in range(500)]


@settings(deadline=None)
@given(
    st.sampled_from(sorted(PARTITIONS)),
    st.integers(1, 20),
    st.integers(0, 99),
    st.sampled_from([0.1, 0.5, 2.0]),
)
def test_every_sample_has_one_owner_and_every_client_a_sample(
    name: str, clients: int, seed: int, parameter: float
) -> None:
    parts = partition(name, LABELS, clients, seed, parameter)
    assert sorted(index for part in parts for index in part) == list(range(500))
    assert len(parts) == clients and all(parts)
    assert parts == partition(name, LABELS, clients, seed, parameter)


def test_iid_parts_are_even() -> None:
    assert {len(part) for part in partition("iid", LABELS, 10, 0, 0)} == {50}


def labels_of(parts: list[list[int]]) -> float:
    return float(np.mean([len({LABELS[index] for index in part}) for part in parts]))


def test_a_small_alpha_leaves_clients_few_labels() -> None:
    few, many = (labels_of(partition("dirichlet", LABELS, 10, 0, alpha)) for alpha in (0.1, 100.0))
    assert few < 5 < many


def test_shards_bound_the_labels() -> None:
    assert labels_of(partition("shards", LABELS, 10, 0, 2)) <= 3


def test_quantity_skews_sizes() -> None:
    sizes = [len(part) for part in partition("quantity", LABELS, 10, 0, 0.3)]
    assert max(sizes) > 4 * min(sizes)


def test_errors() -> None:
    with pytest.raises(DataError, match="did you mean 'dirichlet'"):
        partition("dirichle", LABELS, 2, 0, 1.0)
    with pytest.raises(DataError, match="too few"):
        partition("iid", [0, 1], 3, 0, 1.0)


def test_more_shards_than_samples_are_refused_with_the_numbers() -> None:
    with pytest.raises(DataError, match="10 samples are too few for 4 clients x 3 shards = 12"):
        partition("shards", [0] * 10, 4, 0, 3)
