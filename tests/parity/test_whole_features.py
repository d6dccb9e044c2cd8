"""Grids of ranks for roles that count on whole features between layers, against one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm import World
from plait.parallel import tensor
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity.families import Family
from tests.parity.harness import TOLERANCE, compare, make_engine, reference, train, whole_model

WIDTH = 16
HEADS = 4
GROUPS = 2
INNER = 24


class Attention(nn.Module):
    """Queries of four heads beside keys and values of two, in one packed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.groups = GROUPS
        self.size = WIDTH // HEADS
        self.packed = nn.Linear(WIDTH, WIDTH + 2 * self.groups * self.size)
        self.sinks = nn.Parameter(torch.empty(HEADS))
        self.shared = nn.Linear(WIDTH, self.size)
        self.out = nn.Linear(WIDTH, WIDTH)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.sinks)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [n * self.size for n in (self.heads, self.groups, self.groups)]
        parts = self.packed(x).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        q = q + self.sinks[:, None, None]
        k = k + self.shared(x)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP whose inner features are normalised, with a batch norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.inner = nn.LayerNorm(INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(self.inner(F.gelu(self.up(y))))


class Model(nn.Module):
    """Tokens -> logits, with one table for both where it is tied."""

    def __init__(self, vocabulary: int, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


ROLES = {
    "embed": "embedding",
    "blocks.*.norm": "replicated",
    "blocks.*.attention": "share heads groups sinks:0",
    "blocks.*.attention.packed": f"column {WIDTH}+{WIDTH // 2}+{WIDTH // 2}",
    "blocks.*.attention.shared": "spread",
    "blocks.*.attention.out": "row",
    "blocks.*.batch_norm": "replicated",
    "blocks.*.up": "column",
    "blocks.*.inner": "inner_norm",
    "blocks.*.down": "row",
    "head": "head",
}


@dataclass(frozen=True)
class Packed(Family):
    """The model above; `classes` is its vocabulary."""

    tied: bool = False

    def model(self) -> nn.Module:
        """On the meta device."""
        with torch.device("meta"):
            return Model(self.classes, tied=self.tied)


FAMILY = Packed("packed", {}, (6,), 32, tokens=True, by_slice=True, num_steps=2)
ODD = replace(FAMILY, name="odd packed", classes=30, tied=True)
"""Its vocabulary is divided by the side of a grid, and not by all of it."""


@pytest.mark.parametrize(
    ("plan", "family", "num_samples"),
    [
        ("tp2", FAMILY, 7),
        ("tp1:2d", FAMILY, 7),
        ("tp4:2d", FAMILY, 7),
        ("tp4:2d dp2:zero3 mb2", ODD, 12),
        ("tp8:2.5d,depth2", ODD, 7),
        ("tp8:3d", FAMILY, 7),
    ],
)
def test_equals_one_device(plan: str, family: Packed, num_samples: int) -> None:
    """Samples that do not divide are filled up, which no batch norm may see."""
    whole = f"{plan} precision:float64"
    parsed = Plan.parse(whole)
    options = {"roles": ROLES, "blocks": "blocks.*"}
    copies = [whole_model(family) for _ in range(parsed.world_size)]

    def run(world: World) -> list[Any]:
        engine = make_engine(world, whole, family, options, copies[world.rank])
        return train(engine, family, num_samples)

    results = threaded(parsed.world_size, run, plan=plan)
    outcome = compare(results, reference(family, parsed, num_samples, options))
    assert outcome.largest <= TOLERANCE, outcome


def test_weights_and_inner_activations_lie_in_blocks() -> None:
    def sizes(world: World) -> tuple[tuple[int, ...], int]:
        model = FAMILY.model()
        split = tensor.apply(model, ROLES, tensor.TensorGroup(world, "2d"))
        up = model.get_submodule("blocks.0.up")
        head = split.placements["head.weight"].local_shape
        return tuple(up.get_parameter("weight").shape), math.prod(head)

    for weight, head in threaded(4, sizes, plan="tp4:2d"):
        assert weight == (INNER // 2, WIDTH // 2)
        assert head == 32 * WIDTH // 4
