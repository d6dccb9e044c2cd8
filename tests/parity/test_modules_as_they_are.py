"""Modules of a user's own, without a table of roles: layers are split by what one forward shows."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import build
from plait.engine.splitting import followed_roles
from plait.engine.stages.cut import Cutting
from plait.models import losses
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity.harness import TOLERANCE, join

PLANS = ["dp2:zero3", "tp2", "tp4:2d", "pp2:1f1b tp2 mb2"]


class Block(nn.Module):
    """One key for all queries, and a scale for each head, in code that counts heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.size = width // heads
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * self.size)
        self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(heads, 1, 1))
        up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm(x)
        q = self.q(y).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(y).split(self.size, -1)
        places = torch.arange(length)
        score = q @ k.transpose(1, 2)[:, None] / math.sqrt(self.size) * self.scale
        score = score.masked_fill(places > places[:, None], -math.inf).softmax(-1)
        mixed = (score @ v[:, None]).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm(x))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.start = nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.ModuleList(Block(16, 4) for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.start
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mixer(nn.Module):
    """Blocks that are tables of layers, which nobody calls; the code counts on whole tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": nn.Linear(16, 48),
                    "up": nn.Linear(16, 32),
                    "down": nn.Linear(32, 16),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            q, k, v = block["qkv"](x).reshape(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).reshape(x.shape)
            x = x + block["down"](block["up"](x).relu())
        return self.head(x)


class Taker(nn.Module):
    """Weights that are taken without a call of their layers: of the end, and of whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        up, down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList([nn.Sequential(up, nn.GELU(), down)])
        self.blocks.append(nn.Sequential(nn.Linear(16, 16)))
        self.turn = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block.forward(x)
        x = x @ self.turn.weight
        return self.head(x) + x @ self.embed.weight.t()


class Encoder(nn.Module):
    """Torch's own layers, which one fused operation computes in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 32, (8, 7), generator=torch.Generator().manual_seed(3))
    return ids[:, :-1], ids[:, 1:]


def one_device(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    for _ in range(2):
        total, count = losses.cross_entropy(model(batch()[0]), batch()[1])
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return float((total / count).detach()), dict(model.named_parameters())


def on_rank(world: World, plan: str, model: nn.Module) -> Any:
    engine = build(
        copy.deepcopy(model),
        f"{plan} precision:float64",
        loss=losses.cross_entropy,
        optimizer=sgd,
        world=world,
    )
    axis = world.axis("dp")
    inputs, targets = (part.tensor_split(axis.size)[axis.rank] for part in batch())
    for _ in range(2):
        loss = engine.step((inputs, targets), trace=False).loss
    parts = [
        (part.name, part.global_shape, part.index(), part.values.detach().clone())
        for part in engine.local_parameters()
    ]
    return loss, parts


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [Tokens, Mixer, Taker, Encoder])
def test_a_module_without_a_table_equals_one_device(kind: Any, plan: str) -> None:
    torch.manual_seed(0)
    model = kind().double()
    loss, params = one_device(model)
    results = threaded(Plan.parse(plan).world_size, on_rank, plan, model, plan=plan)
    assert results[0][0] == pytest.approx(loss, rel=TOLERANCE)
    found = join([parts for _, parts in results])
    for name, expected in params.items():
        difference = (found[name] - expected.detach().flatten()).abs().max()
        assert difference < TOLERANCE * expected.abs().max(), name


def test_what_cannot_be_split_is_left_whole_and_the_rest_is_split() -> None:
    cutting = Cutting(example=batch()[0][:1])
    roles = followed_roles(Tokens(), cutting, 2).roles
    assert roles["blocks.*.out"] == "row" and roles["blocks.*.q"] == "column"
    assert roles["blocks.*.mlp.0"] == "column" and roles["blocks.*.mlp.2"] == "row"
    assert roles[""] == "whole" and roles["blocks.*"] == "share heads scale:0"
    table = followed_roles(Mixer(), cutting, 2)
    assert table.roles["blocks.*.down"] == "row" and table.roles["blocks.*.qkv"] == "replicated"
    assert any(
        one.startswith("blocks.*.qkv is computed alike on every rank: it is no row")
        for one in table.notes
    )


def test_torchs_own_encoder_layers_are_split_and_left_as_they_were() -> None:
    model = Encoder().eval()
    attention = model.encoder.layers[0].self_attn
    attention.dropout = 0.5
    roles = followed_roles(model, Cutting(example=batch()[0][:1]), 2).roles
    assert roles["encoder.layers.*.linear1"] == "column"
    assert roles["encoder.layers.*.linear2"] == "row"
    assert attention.dropout == 0.5 and not any(one.training for one in model.modules())


class Counting(nn.Module):
    """Counts its forwards, and subtracts a mean that each of them moves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 32)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.up(x).relu()) - self.mean
        self.steps += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.head(x)


def buffers_on_rank(world: World, model: nn.Module) -> dict[str, Tensor]:
    engine = build(
        copy.deepcopy(model),
        "tp2 precision:float64",
        loss=losses.cross_entropy,
        optimizer=sgd,
        world=world,
    )
    engine.step(batch(), trace=False)
    return {name: buffer.clone() for name, buffer in engine.model.named_buffers()}


def test_a_forward_that_shows_roles_moves_no_buffer() -> None:
    model = Counting().double()
    for buffers in threaded(2, buffers_on_rank, model, plan="tp2"):
        assert int(buffers["steps"]) == 1
    model(batch()[0])
    torch.testing.assert_close(buffers["mean"], model.mean, rtol=1e-12, atol=1e-12)
