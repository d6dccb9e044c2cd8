"""Numbers by hash look random, and depend on (seed, index) alone."""

from __future__ import annotations

import pytest
import torch

from plait.datasets.hashing import integers, mix, normals, seed_of, uniforms


def test_splitmix64_gives_its_published_sequence() -> None:
    """The first outputs of the reference generator with seed 1234567 are mix(seed + i), taken as
    unsigned.
    """
    golden = 0x9E3779B97F4A7C15
    # mix multiplies by the golden constant itself: undo it to feed the state that the reference
    # would have.
    inverse = pow(golden, -1, 2**64)
    states = [(1234567 + golden * step) * inverse % 2**64 for step in (1, 2, 3)]
    signed = torch.tensor([state - 2**64 if state >= 2**63 else state for state in states])
    assert [value % 2**64 for value in mix(signed).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_a_row_depends_on_seed_and_index_alone() -> None:
    rows = normals(torch.tensor([7, 3, 9]), 5, seed=1)
    torch.testing.assert_close(normals(torch.tensor([3]), 5, seed=1)[0], rows[1], rtol=0, atol=0)
    assert not torch.equal(normals(torch.tensor([3]), 5, seed=2)[0], rows[1])


def test_distributions() -> None:
    indices = torch.arange(2000)
    x = normals(indices, 50, seed=0)
    assert x.mean().item() == pytest.approx(0, abs=0.02)
    assert x.std().item() == pytest.approx(1, abs=0.02)
    assert torch.corrcoef(x.T).fill_diagonal_(0).abs().max() < 0.15
    u = uniforms(indices, 50, seed=0)
    assert 0 < u.min() < 0.001 < 0.999 < u.max() <= 1
    counts = torch.bincount(integers(indices, 50, below=10, seed=0).flatten(), minlength=10)
    assert len(counts) == 10
    assert (counts - 10_000).abs().max() < 500


def test_seeds_fit_every_generator() -> None:
    seeds = {seed_of(seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**31 for seed in seeds)
