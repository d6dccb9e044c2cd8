"""Masks are uneven, repeat exactly, and never take everything."""

from __future__ import annotations

import pytest
import torch

from plait.datasets import Loader, Masked
from plait.datasets.masked import IGNORE
from plait.datasets.random import RandomClasses, RandomTokens
from plait.errors import DataError
from plait.models import losses


def test_the_mark_is_the_losses() -> None:
    assert IGNORE == losses.IGNORE


def test_sequences_keep_an_uneven_beginning() -> None:
    plain = RandomTokens(12, 50, num_samples=40)
    masked = Masked(plain, seed=1)
    inputs, targets = masked.batch(torch.arange(40))
    expected_inputs, expected = plain.batch(torch.arange(40))
    assert torch.equal(inputs, expected_inputs)
    kept = targets != IGNORE
    lengths = kept.sum(1)
    assert torch.equal(targets[kept], expected[kept])
    assert torch.equal(kept, torch.arange(12) < lengths[:, None])
    assert lengths.min() >= 1
    assert len(set(lengths.tolist())) > 6
    assert torch.equal(masked[7][1], targets[7])
    assert not torch.equal(Masked(plain, seed=2).batch(torch.arange(40))[1], targets)


def test_classes_are_masked_whole() -> None:
    _, targets = Masked(RandomClasses((3,), 4, num_samples=100)).batch(torch.arange(100))
    assert 30 < int((targets == IGNORE).sum()) < 70
    assert targets[0] != IGNORE


def test_ranks_see_the_same_masks() -> None:
    data = Masked(RandomTokens(12, 50, num_samples=10))
    whole = next(Loader(data, 5))
    parts = [next(Loader(data, 5, dp_size=2, dp_rank=rank)) for rank in range(2)]
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])


def test_numbers_cannot_be_masked() -> None:
    with pytest.raises(DataError, match=r"targets of torch.float32 cannot be masked"):
        next(Loader(Masked([(torch.zeros(2), torch.zeros(2))]), 1))
