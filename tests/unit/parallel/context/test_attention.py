"""Attention on sequence shards against attention on one device, on simulated ranks: every size,
head layout and mask.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.errors import DataError, PlanError
from plait.mesh import Mesh
from plait.models.layers import CausalAttention
from plait.parallel.context import ContextGroup, UlyssesAttention, ring_schedule
from plait.parallel.context.block import attend, attend_backward, merge
from plait.parallel.context.ring import ring_attention
from tests.helpers.threaded import threaded

B = 2
K = 4


def inputs(heads: int, kv_heads: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [
        (B, heads, length, K),
        (B, kv_heads, length, K),
        (B, kv_heads, length, K),
        (B, heads, length, K),
    ]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def one_device(
    heads: int, kv_heads: int, length: int, documents: Tensor | None = None
) -> list[Tensor]:
    q, k, v, grad = inputs(heads, kv_heads, length)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def on_ranks(
    size: int, strategy: str, shape: tuple[int, int, int], documents: Tensor | None = None
) -> list[Tensor]:
    def rank(world: Any) -> list[Tensor]:
        group = ContextGroup(world.axis("cp"), strategy)
        q, k, v, grad = (
            group.cut(x.transpose(1, 2)).transpose(1, 2).contiguous() for x in inputs(*shape)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        if strategy == "ring":
            out = ring_attention(q, k, v, group, documents)
        else:
            out = UlyssesAttention(group, CausalAttention())(q, k, v)
        group.cut(torch.zeros(1, shape[2]))
        parts = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        return [
            torch.stack([group.positions().double()[None, None, :, None].expand_as(part), part])
            for part in parts
        ]

    found = threaded(size, rank, plan=Mesh(cp=size))
    whole = []
    for parts in zip(*found, strict=True):
        places = torch.cat([part[0, 0, 0, :, 0] for part in parts]).long()
        whole.append(torch.cat([part[1] for part in parts], dim=2)[:, :, places.argsort()])
    return whole


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_equals_one_device(strategy: str, size: int, heads: int, kv_heads: int) -> None:
    for length in (8, 24):
        for found, expected in zip(
            on_ranks(size, strategy, (heads, kv_heads, length)),
            one_device(heads, kv_heads, length),
            strict=True,
        ):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("met_at_once", [1, 12, 18])
def test_equals_one_device_in_rounds_of_any_length(
    monkeypatch: pytest.MonkeyPatch, met_at_once: int
) -> None:
    monkeypatch.setattr(ring_schedule, "KEYS_PER_STEP", met_at_once)
    documents = (torch.arange(36)[None] > torch.tensor([[7], [16]])).long()
    for size in (2, 3, 6):
        for packed in (None, documents):
            found = on_ranks(size, "ring", (4, 2, 36), packed)
            expected = one_device(4, 2, 36, packed)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("met_at_once", [1, 16, 40, 128])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_every_key_is_seen_by_whom_it_precedes_in_one_visit(
    monkeypatch: pytest.MonkeyPatch, size: int, met_at_once: int
) -> None:
    monkeypatch.setattr(ring_schedule, "KEYS_PER_STEP", met_at_once)
    length = 8

    def rank(world: Any) -> Tensor:
        group = ContextGroup(world.axis("cp"), "ring")
        group.seq_len = size * length
        schedule = ring_schedule.RingSchedule(group, 1, ring_schedule.Visibility())
        here = group.positions()
        seen = torch.zeros(size * length, size * length, dtype=torch.long)
        seen[here[:, None], here[None, :]] += torch.ones(length, length, dtype=torch.long).tril()
        met = []
        for step in schedule.steps():
            assert (
                sum(len(block.ranks) for block in step.blocks)
                == len(step.shifts)
                <= max(1, met_at_once // length)
            )
            for block in step.blocks:
                met += list(reversed(block.ranks))
                theirs = torch.cat([group.positions(other)[block.cols] for other in block.ranks])
                seen[here[block.rows][:, None], theirs[None, :]] += 1
        assert met == [(group.axis.rank - step) % size for step in range(1, size)]
        return seen

    whole = torch.stack(threaded(size, rank, plan=Mesh(cp=size))).sum(0)
    assert torch.equal(whole, torch.ones_like(whole).tril())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_packed_sequences_do_not_see_each_other(size: int) -> None:
    length = 24
    starts = torch.rand(B, length, generator=torch.Generator().manual_seed(0)) < 0.2
    documents = starts.long().cumsum(1)
    assert documents.max() >= 3
    for found, expected in zip(
        on_ranks(size, "ring", (4, 2, length), documents),
        one_device(4, 2, length, documents),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_a_block_that_is_masked_wholly_adds_nothing() -> None:
    q, k, v, _ = inputs(2, 2, 4)
    nothing = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    out, lse = attend(q, k, v, causal=False, mask=nothing)
    assert not out.any() and bool(torch.isneginf(lse).all())
    whole, whole_lse = attend(q, k, v, causal=True)
    merged = whole.clone()
    merged_lse = whole_lse.clone()
    merge(merged, merged_lse, out, lse)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, whole_lse)
    merged = out.clone()
    merged_lse = lse.clone()
    merge(merged, merged_lse, whole, whole_lse)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, whole_lse)
    assert not any(
        part.any()
        for part in attend_backward(out, (q, k, v), whole, whole_lse, causal=False, mask=nothing)
    )
    merge(out, lse, out.clone(), lse.clone())
    assert not out.isnan().any()


def test_kernel_and_formula_agree() -> None:
    q, k, v, grad = inputs(2, 2, 6)
    everything = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    (out, lse), (plain, plain_lse) = (
        attend(q, k, v, causal=True),
        attend(q, k, v, causal=True, mask=everything),
    )
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(lse, plain_lse)
    ours = attend_backward(grad, (q, k, v), out, lse, causal=True)
    theirs = attend_backward(grad, (q, k, v), out, lse, causal=True, mask=everything)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("strategy", "size"), [("ring", 2), ("ring", 3), ("ulysses", 4)])
def test_every_position_is_held_once_and_work_is_even(strategy: str, size: int) -> None:
    def rank(world: Any) -> tuple[Tensor, Tensor]:
        group = ContextGroup(world.axis("cp"), strategy)
        cut = group.cut((torch.arange(24)[None].repeat(2, 1), torch.arange(5)))
        assert torch.equal(cut[0][0], group.positions()) and cut[1].numel() == 5
        parts = torch.cat([group.positions(r) for r in range(size)])
        assert torch.equal(parts[group.order()], torch.arange(24))
        return group.positions(), group.positions().double().sum()

    found = threaded(size, rank, plan=Mesh(cp=size))
    assert sorted(torch.cat([places for places, _ in found]).tolist()) == list(range(24))
    if strategy == "ring":
        assert len({float(work) for _, work in found}) == 1


def test_errors_name_the_numbers_and_the_cure() -> None:
    def rank(world: Any) -> None:
        group = ContextGroup(world.axis("cp"), "ring")
        with pytest.raises(
            DataError, match="10 tokens do not divide; the nearest seq_len is 8 or 12"
        ):
            group.cut(torch.zeros(1, 10))
        with pytest.raises(DataError, match=r"lengths \[8, 12\]"):
            group.cut((torch.zeros(1, 8), torch.zeros(1, 12)))
        heads = torch.zeros(1, 3, 4, 4)
        with pytest.raises(PlanError, match="3 heads and 3 key-value heads"):
            UlyssesAttention(ContextGroup(world.axis("cp"), "ulysses"), CausalAttention())(
                heads, heads, heads
            )

    threaded(2, rank, plan=Mesh(cp=2))


@pytest.mark.parametrize("size", [2, 4])
def test_traffic_equals_the_formula(size: int) -> None:
    """Ring: keys and values n-1 times forward, and with their gradients 2 (n-1) times backward.
    Ulysses: (n-1)/n of all.
    """
    heads = 8
    kv_heads = 4
    length = 16
    here = B * K * (length // size) * 8

    def rank(world: Any, strategy: str) -> tuple[int, int]:
        group = ContextGroup(world.axis("cp"), strategy)
        q, k, v, _ = (
            group.cut(x.transpose(1, 2)).transpose(1, 2).contiguous()
            for x in inputs(heads, kv_heads, length)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        attention = (
            ring_attention
            if strategy == "ring"
            else lambda q, k, v, g: UlyssesAttention(g, CausalAttention())(q, k, v)
        )
        out = attention(q, k, v, group)
        forward = world.ledger.bytes()
        torch.autograd.grad(out.sum(), leaves)
        return forward, world.ledger.bytes() - forward

    for forward, backward in threaded(size, rank, "ring", plan=Mesh(cp=size)):
        assert forward == (size - 1) * 2 * kv_heads * here
        assert backward == 2 * forward
    for forward, backward in threaded(size, rank, "ulysses", plan=Mesh(cp=size)):
        assert forward == backward == (size - 1) / size * (2 * heads + 2 * kv_heads) * here
