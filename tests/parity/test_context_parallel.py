"""The parity table of the context axis: ring and Ulysses, alone and with data parallelism, against one device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.comm import World
from plait.context import ContextGroup
from plait.context.ring import ring_attention
from plait.mesh import Mesh
from tests.parity.harness import TOLERANCE, check

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("family", ["long-llama", "long-gpt"])
@pytest.mark.parametrize("plan", ["cp2:ring", "cp4:ring mb2", "cp2:ulysses mb2", "cp4:ulysses"])
def test_equals_one_device(ranks: Run, plan: str, family: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, 5)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "plan",
    [
        "cp2:ring dp2:zero1 mb2", "cp2:ulysses dp2:zero2 mb2", "cp2:ring dp2:zero3", "cp2:ulysses dp2:ring",
        "cp2:ring dp2:server", "cp2:ring dp2:zero3,replicate2",
    ],
)  # fmt: skip
def test_shards_over_data_and_context(ranks: Run, plan: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", "long-llama", 5, clip_grad_norm=0.05)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("family", ["long-llama", "long-gpt"])
@pytest.mark.parametrize(
    "plan",
    ["cp2:ring tp2 dp2:zero1", "cp2:ring tp2:1d,sp", "cp2:ulysses tp2:1d,sp", "cp2:ring tp4:2d", "pp2:1f1b cp2:ring mb2"],
)
def test_composes(ranks: Run, plan: str, family: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, 5)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", ["cp2:ring mb2", "cp2:ulysses mb2", "cp2:ring dp2:zero3 mb2"])
@pytest.mark.parametrize("remat", ["selective", "full"])
def test_recomputes(ranks: Run, plan: str, remat: str) -> None:
    outcome = check(ranks, f"{plan} remat:{remat} precision:float64", "long-llama", 5)
    assert outcome.largest <= TOLERANCE, outcome


class _Live(TorchDispatchMode):
    """The most bytes of tensors made inside that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()).data_ptr() not in self._known:
                key, size = storage.data_ptr(), storage.nbytes()
                self._known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def ring_peak(world: World, positions_a_rank: int) -> int:
    group = ContextGroup(world.axis("cp"), "ring")
    group.cut(torch.zeros(1, positions_a_rank * world.size))
    q, k, v = (torch.randn(2, 4, positions_a_rank, 16, requires_grad=True) for _ in range(3))
    with _Live() as live:
        ring_attention(q, k, v, group).sum().backward()
    return live.peak


def test_memory_of_a_rank_stays_when_sequence_and_ranks_double(ranks: Run) -> None:
    """From 4 ranks on; 2 have no step in the middle, in which two more blocks of keys and values are under way."""
    peaks = {size: max(ranks(size, ring_peak, 128, plan=Mesh(cp=size))) for size in (4, 8)}
    assert peaks[8] <= 1.05 * peaks[4], peaks
