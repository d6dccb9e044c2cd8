"""Buckets that are larger than the buffers of their gradients, which go piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from plait.comm import World
from plait.comm.simulated import simulate
from plait.mesh import Mesh
from plait.parallel.data import pooled
from plait.parallel.data.gradients import BucketState
from plait.parallel.data.shards import ShardedGradients
from tests.helpers.pool import mesh_of
from tests.parity.families import family_of
from tests.parity.harness import TOLERANCE, check, make_engine

PIECE_BYTES = 400


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Elements of the pieces that all ranks reduce."""
    found: list[int] = []
    plain = pooled.PooledGradients._fill

    def fill(store: Any, state: BucketState, start: int, stop: int) -> None:
        found.append(stop - start)
        plain(store, state, start, stop)

    def made(like: Tensor, numel: int) -> Tensor:
        """New memory holds no numbers: whoever reads an element before it is summed sees it."""
        return like.new_full((numel,), float("nan"))

    monkeypatch.setattr(ShardedGradients, "_made", staticmethod(made))
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


@pytest.mark.parametrize("plan", ["dp2:zero2", "dp2:zero3"])
def test_a_forward_begins_without_memory_for_large_shards(plan: str, lengths: list[int]) -> None:
    """Small ones keep theirs: to make pages again takes longer than to have them."""

    def act(world: World) -> tuple[list[int], list[int]]:
        family = family_of("gpt")
        engine = make_engine(world, plan, family, {})
        batch = family.batches(4)[0]
        engine.step(batch, trace=False)
        after = [one.numel() for one in engine.strategy.live_tensors()["gradients"]]
        before: list[int] = []
        block = next(iter(engine.model.blocks))  # type: ignore[arg-type]

        def look(*_: object) -> None:
            before.extend(one.numel() for one in engine.strategy.live_tensors()["gradients"])

        block.register_forward_pre_hook(look)
        engine.step(batch, trace=False)
        return after, before

    for after, before in run(2, act, plan=plan):
        is_large = [numel * 2 * 4 > PIECE_BYTES for numel in after]
        assert any(is_large)
        assert [not numel for numel in before] == is_large
