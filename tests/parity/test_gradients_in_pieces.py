"""Buckets that are larger than the buffers of their gradients, which go piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plait.comm.simulated import simulate
from plait.mesh import Mesh
from plait.parallel.data import pooled
from plait.parallel.data.gradients import BucketState
from tests.helpers.pool import mesh_of
from tests.parity.harness import TOLERANCE, check

PIECE_BYTES = 400


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Elements of the pieces that all ranks reduce."""
    found: list[int] = []
    plain = pooled.PooledGradients._fill

    def fill(store: Any, state: BucketState, start: int, stop: int) -> None:
        found.append(stop - start)
        plain(store, state, start, stop)

    monkeypatch.setattr(pooled, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(pooled.PooledGradients, "_fill", fill)
    yield found


def run(n: int, fn: Any, *args: Any, plan: str | Mesh | None = None) -> list[Any]:
    return simulate(mesh_of(plan, n), fn, *args)


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ("dp2:zero2", "gpt"),
        ("dp3:zero2 mb3", "gpt"),
        ("dp2:zero3 mb2", "gpt"),
        ("dp3:zero3", "mlp"),
        ("dp4:zero3,replicate2", "gpt"),
        ("dp2:zero3 tp2", "split-llama"),
        ("pp2:zbv dp2:zero2 mb4", "gpt-deep"),
    ],
)
def test_gradients_in_pieces_are_equal(plan: str, family: str, lengths: list[int]) -> None:
    text = f"{plan} precision:float64"
    assert check(run, text, family, 12, clip_grad_norm=0.5).largest < TOLERANCE
    assert len(set(lengths)) > 1, "a last piece is shorter"
    assert max(lengths) <= PIECE_BYTES // 8 // 2
