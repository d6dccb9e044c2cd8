"""`scaled_dot_product_attention` of parts of a sequence against torch's own on whole ones: every
kind of mask, scale and head.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.errors import ModelError, PlanError
from plait.mesh import Mesh
from plait.parallel.context import ContextGroup
from plait.parallel.context.shared import Interception, shared_attention
from tests.helpers.threaded import threaded

B = 2
H = 4
S = 24
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
WINDOW = CAUSAL & torch.ones(S, S, dtype=torch.bool).triu(-5)
CHUNKS = CAUSAL & (torch.arange(S)[:, None] // 6 == torch.arange(S)[None] // 6)
KEYS = (torch.arange(S)[None] < torch.tensor([[17], [24]]))[:, None, None]
SLOPES = -torch.tensor([0.5, 0.25, 0.1, 0.01], dtype=torch.float64)[None, :, None, None]
DISTANCE = (torch.arange(S)[:, None] - torch.arange(S)[None]).abs().double()
LOWEST = torch.finfo(torch.float64).min
CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "bidirectional": {},
    "sliding window": {"attn_mask": WINDOW[None, None]},
    "chunks": {"attn_mask": CHUNKS},
    "padded keys": {"attn_mask": KEYS},
    "padded and causal": {"attn_mask": KEYS & CAUSAL},
    "bias of each head": {"attn_mask": SLOPES * DISTANCE},
    "bias with the lowest number": {"attn_mask": CAUSAL.logical_not().double() * LOWEST},
    "another scale": {"is_causal": True, "scale": 0.3},
}


def inputs(kv_heads: int, key: int, value: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(H, key), (kv_heads, key), (kv_heads, value), (H, value)]
    return [
        torch.randn(B, heads, S, size, dtype=torch.float64, generator=generator)
        for heads, size in shapes
    ]


def compare(strategy: str, size: int, sizes: tuple[int, int, int], how: dict[str, Any]) -> None:
    q, k, v, grad = inputs(*sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bias = how.get("attn_mask")
    if bias is not None and bias.requires_grad:
        leaves.append(bias)
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def rank(world: Any) -> list[Tensor]:
        group = ContextGroup(world.axis("cp"), strategy)
        group.seq_len = S
        whole = [x.detach().requires_grad_() for x in leaves]
        given = {**how, "attn_mask": whole[3]} if len(whole) > 3 else how
        parts = [group.take(x, 2).contiguous() for x in whole[:3]]
        with Interception(lambda *a, **kw: shared_attention(group, *a, **kw)):
            out = F.scaled_dot_product_attention(*parts, enable_gqa=True, **given)
        found = torch.autograd.grad(out, whole, group.take(grad, 2))
        return [group.gather(out.detach(), 2), *found]

    found = threaded(size, rank, plan=Mesh(cp=size))
    torch.testing.assert_close(found[0][0], expected[0], rtol=1e-11, atol=1e-12)
    for parts, whole in zip(zip(*found, strict=True), expected, strict=True):
        total = parts[0] if whole is expected[0] else torch.stack(parts).sum(0)
        torch.testing.assert_close(total, whole, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("case", CASES)
def test_any_mask_equals_one_device(case: str, strategy: str) -> None:
    compare(strategy, 2, (H, 6, 6), CASES[case])


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("sizes", [(2, 6, 6), (1, 6, 6), (4, 6, 4), (4, 4, 6)])
@pytest.mark.parametrize("case", ["causal", "sliding window"])
def test_heads_of_any_number_and_size(
    case: str, sizes: tuple[int, int, int], strategy: str
) -> None:
    compare(strategy, 4, sizes, CASES[case])


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_bias_that_is_learned_gets_its_gradient(strategy: str) -> None:
    bias = torch.randn(1, H, S, S, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    compare(strategy, 2, (H, 6, 6), {"attn_mask": bias.requires_grad_()})


def test_other_attention_is_left_alone_and_what_cannot_be_is_refused() -> None:
    def rank(world: Any) -> None:
        group = ContextGroup(world.axis("cp"), "ring")
        group.seq_len = S
        q, k, v, _ = inputs(H, 6, 6)
        latent = shared_attention(group, q[:, :, :5], k[:, :, :3], v[:, :, :3])
        alone = F.scaled_dot_product_attention(q[:, :, :5], k[:, :, :3], v[:, :, :3])
        assert torch.equal(latent, alone)
        part = [x[:, :, : S // 2] for x in (q, k, v)]
        with pytest.raises(ModelError, match="says nothing about the others"):
            shared_attention(group, *part, CAUSAL[: S // 2, : S // 2])
        with pytest.raises(PlanError, match=r"drops 0\.5 of its weights"):
            shared_attention(group, *part, dropout_p=0.5)
        with pytest.raises(ModelError, match="both have to be"):
            shared_attention(group, part[0], k[:, :, :3], v[:, :, :3])
        by_heads = ContextGroup(world.axis("cp"), "ulysses")
        by_heads.seq_len = S
        with pytest.raises(PlanError, match="3 heads and 3 key-value heads"):
            shared_attention(by_heads, *(x[:, :3] for x in part))

    threaded(2, rank, plan=Mesh(cp=2))
