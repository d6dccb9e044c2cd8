"""Modules whose forward depends on values are described as exactly as others: here routers written
in three ways.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.predict.cost import describe
from plait.predict.cost.model import with_values
from plait.predict.cost.model.operations import Attention, Matmul

HIDDEN = 64
INNER = 128
EXPERTS = 8
CHOSEN = 2
LAYERS = 3
VOCAB = 100


class Experts(nn.Module):
    """Experts that count their tokens: by index, by lists of counts, or by a mask."""

    def __init__(self, way, inner):
        super().__init__()
        self.way = way
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, inner), nn.ReLU(), nn.Linear(inner, HIDDEN))
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        rows = x.reshape(-1, HIDDEN)
        weights, chosen = self.router(rows).softmax(-1).topk(CHOSEN, -1)
        out = torch.zeros_like(rows)
        if self.way == "counts":
            order = chosen.flatten().argsort()
            counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
            parts = rows[order // CHOSEN].split(counts)
            done = torch.cat(
                [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
            )
            return out.index_add(0, order // CHOSEN, done * weights.flatten()[order, None]).reshape(
                x.shape
            )
        for index, expert in enumerate(self.experts):
            if self.way == "mask":
                mask = (chosen == index).any(-1)
                out[mask] = out[mask] + expert(rows[mask])
            else:
                token, place = torch.where(chosen == index)
                if len(token):
                    out = out.index_add(0, token, expert(rows[token]) * weights[token, place, None])
        return out.reshape(x.shape)


class Layer(nn.Module):
    """Attention beside the experts: it is seen although the experts need values."""

    def __init__(self, way, inner):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, 3 * HIDDEN),
            nn.Linear(HIDDEN, HIDDEN),
        )
        self.experts = Experts(way, inner)

    def forward(self, x):
        samples, length, _ = x.shape
        query, key, value = (
            self.qkv(self.norm(x))
            .reshape(samples, length, 3, 4, HIDDEN // 4)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.experts(x)


class Net(nn.Module):
    """A language model of such layers."""

    def __init__(self, way, inner=INNER):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleList(Layer(way, inner) for _ in range(LAYERS))

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def expected_flops(seq_len, inner=INNER):
    layer = (
        2 * (4 * HIDDEN * HIDDEN + HIDDEN * EXPERTS + 2 * CHOSEN * HIDDEN * inner)
        + 2 * seq_len * HIDDEN
    )
    return seq_len * (LAYERS * layer + 2 * HIDDEN * VOCAB)


@pytest.mark.parametrize("way", ["where", "counts", "mask"])
@pytest.mark.parametrize("seq_len", [16, 2048])
def test_a_router_that_counts_tokens(way, seq_len):
    with torch.device("meta"):
        module = Net(way)
    model = describe(module, seq_len)
    assert model.parameters == sum(param.numel() for param in module.parameters())
    assert model.forward_flops == pytest.approx(expected_flops(seq_len))
    assert [count for block, count in model.runs if block.name == "Layer"] == [LAYERS]
    layer = next(block for block, _ in model.runs if block.name == "Layer")
    assert (
        any(isinstance(op, Attention) for op in layer.operations)
        and layer.saved.sequence > 4 * HIDDEN
    )


def test_large_weights_are_one_number_and_few_tokens_are_run(monkeypatch):
    monkeypatch.setattr(with_values, "LARGE", 1000)
    monkeypatch.setattr(with_values, "MOST_FLOPS", 3e7)
    with torch.device("meta"):
        module = Net("where", inner=4 * INNER)
    assert with_values.tokens_for(module.layers[0]) < 64
    assert describe(module, 512).forward_flops == pytest.approx(expected_flops(512, 4 * INNER))


def test_what_is_too_large_for_any_run_is_described_by_its_layers(monkeypatch):
    monkeypatch.setattr(with_values, "MOST_FLOPS", 1.0)
    with torch.device("meta"):
        module = Net("where")
    model = describe(module, 64)
    assert model.parameters == sum(param.numel() for param in module.parameters())
    layer = next(block for block, _ in model.runs if block.name == "Layer")
    assert sum(isinstance(op, Matmul) for op in layer.operations) == 2 * EXPERTS + 3


def test_a_module_that_is_nothing_but_experts():
    with torch.device("meta"):
        module = Experts("where", INNER)
    model = describe(module, 32)
    assert model.parameters == sum(param.numel() for param in module.parameters())
    assert model.forward_flops == pytest.approx(
        32 * 2 * (HIDDEN * EXPERTS + 2 * CHOSEN * HIDDEN * INNER)
    )


def test_no_module_is_changed_by_being_described():
    with torch.device("meta"):
        module = Net("where")
    describe(module, 16)
    assert all(param.is_meta for param in module.parameters()) and "forward" not in vars(
        module.layers[0]
    )
