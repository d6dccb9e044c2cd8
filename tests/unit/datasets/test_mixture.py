"""A mixture keeps its weights, gives each sample of a set once before any twice, and any place is
found without those before.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.datasets import Loader
from plait.datasets.mixture import BLOCK, SampleMixture, quotas
from plait.datasets.text import Windows
from plait.errors import DataError


class Numbers:
    """Samples that say which set and which number they are."""

    keyed_order = True
    num_bad: int | None = None

    def __init__(self, name: int, num_samples: int) -> None:
        self.name = name
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.name, index

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(indices, self.name), indices


def drawn(loader: Loader, steps: int) -> list[tuple[int, int]]:
    batches = [next(loader) for _ in range(steps)]
    return [pair for batch in batches for pair in zip(*(x.tolist() for x in batch), strict=True)]


def test_weights_are_kept_in_every_block_and_each_sample_comes_once_an_epoch() -> None:
    plain = [(2, number) for number in range(7)]
    mixture = SampleMixture([Numbers(0, 700), Numbers(1, 90), plain], [[6, 3, 1]])
    pairs = drawn(Loader(mixture, 64, seed=1), 2 * BLOCK // 64)
    for begin in (0, BLOCK):
        counts = Counter(name for name, _ in pairs[begin : begin + BLOCK])
        assert [counts[name] for name in range(3)] == list(quotas([6, 3, 1]))
    for name, size in enumerate([700, 90, 7]):
        mine = [number for owner, number in pairs if owner == name]
        for begin in range(0, len(mine) - size + 1, size):
            assert sorted(mine[begin : begin + size]) == list(range(size))
    firsts = [number for owner, number in pairs if owner == 1]
    assert firsts[:90] != firsts[90:180]


def test_any_place_is_found_alone() -> None:
    sets = [Numbers(0, 10**9), Numbers(1, 10**6)]
    mixture = SampleMixture(sets, [[2, 1], [0, 1], [1, 1]], [0, 1500, 2600], seed=4)
    whole = drawn(Loader(mixture, 50), 80)
    again = SampleMixture(sets, [[2, 1], [0, 1], [1, 1]], [0, 1500, 2600], seed=4)
    for place in (3999, 2600, 2599, 1500, 1499, 1024, 0):
        assert again.drawn(place) == whole[place]
    assert {owner for owner, _ in whole[1500:2600]} == {1}
    assert len(set(whole)) == len(whole)
    assert again.batch(torch.tensor([10**12]))[0].shape == (1,)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_and_resumes_change_nothing(size: int) -> None:
    mixture = SampleMixture([Numbers(0, 40), Numbers(1, 5)], [[1, 1]], seed=2)
    whole = drawn(Loader(mixture, 7), 6)
    first = Loader(mixture, 7)
    drawn(first, 3)
    ranks = [Loader(mixture, 7, dp_size=size, dp_rank=rank) for rank in range(size)]
    for loader in ranks:
        loader.load_state_dict(first.state_dict())
    rest = [pair for _ in range(3) for loader in ranks for pair in drawn(loader, 1)]
    assert rest == whole[21:]


def test_another_mixture_is_refused_on_resume() -> None:
    sets = [Numbers(0, 40), Numbers(1, 5)]
    state: dict[str, Any] = Loader(SampleMixture(sets, [[1, 1]]), 7).state_dict()
    with pytest.raises(DataError, match="samples would come twice or never"):
        Loader(SampleMixture(sets, [[1, 2]]), 7).load_state_dict(state)


def test_bad_rows_are_those_of_the_sets_that_count_them() -> None:
    counting = Numbers(1, 5)
    counting.num_bad = 3
    sets = [Numbers(0, 40), counting, [(2, 0)]]
    assert SampleMixture(sets, [[1, 1, 1]]).num_bad == 3


def test_quotas_fill_a_block() -> None:
    for weights in ([1], [1, 1, 1], [1e-9, 1], [5, 0, 2], list(range(1, 50))):
        found = quotas(weights)
        assert sum(found) == BLOCK
        assert [quota > 0 for quota in found] == [weight > 0 for weight in weights]
    with pytest.raises(DataError, match="must be positive"):
        quotas([0, 0])


def test_sets_of_other_shapes_are_refused() -> None:
    mixture = SampleMixture([[(torch.zeros(2), 1)], [(torch.zeros(3), 1)]], [[1, 1]])
    with pytest.raises(DataError, match="samples that cannot be stacked"):
        mixture.batch(torch.arange(20))


def test_a_place_that_was_saved_before_texts_had_a_checksum_is_taken() -> None:
    sets = [Windows(torch.arange(90, dtype=torch.uint8), 8), Numbers(1, 40)]
    mixture = SampleMixture(sets, [[2, 1]])
    assert mixture.content == 4076358045210989709  # of such a checkpoint
