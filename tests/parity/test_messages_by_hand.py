"""Rounded messages against one device that rounds the same numbers by hand, in float64.

The model by hand computes the parts of both tensor ranks one after the other. Each part is rounded
to bf16 before it is added, and so is what a pipeline stage would send. Nothing else differs, so
both runs agree to the last places of float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait import models
from plait.comm import World
from plait.engine.build import build
from plait.engine.options import Options
from plait.engine.stages.cut import Cutting
from plait.models.losses import cross_entropy
from plait.plan import Plan
from plait.plan.precisions import Messages
from plait.verify.record.compare import differences
from plait.verify.record.observe import RankRecord, join, record_rank
from tests.helpers.threaded import threaded
from tests.parity.test_predicted_traffic import MODELS, batches

Run = Callable[..., list[Any]]
PARTS = 2
STEPS = 2
CUT = 2
"""The first block of the second stage."""
TOLERANCE = 1e-10
PLANS = [
    *("tp2", "tp2:1d,sp", "pp2:1f1b mb2"),
    pytest.param("pp2:1f1b tp2 mb2", marks=pytest.mark.long),
]


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def added(parts: tuple[Tensor, ...]) -> Tensor:
    """The sum in bf16 of what two ranks send."""
    first, second = (part.to(torch.bfloat16) for part in parts)
    return (first + second).to(parts[0].dtype)


class Added(torch.autograd.Function):
    """What a row of tensor ranks adds up; each summand's gradient is the sum's.

    Where ranks keep parts of the sequence (`parts`), that gradient is gathered.
    """

    @staticmethod
    def forward(ctx: Any, parts: bool, *summands: Tensor) -> Tensor:
        ctx.parts = parts
        return added(summands)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        own = rounded(gradients[0]) if ctx.parts else gradients[0]
        return None, *((own,) * PARTS)


class Entered(torch.autograd.Function):
    """One tensor for the columns of both ranks, gathered from `parts` of the sequence or not. Its
    gradients are added up.
    """

    @staticmethod
    def forward(ctx: Any, parts: bool, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(rounded(x) if parts else x.clone() for _ in range(PARTS))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, added(gradients)


class Sent(torch.autograd.Function):
    """An activation to the next stage, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return rounded(gradients[0])


def linear(x: Tensor, layer: Any, rank: int) -> Tensor:
    """The features of one rank of a column."""
    bias = None if layer.bias is None else layer.bias.chunk(PARTS)[rank]
    return F.linear(x, layer.weight.chunk(PARTS)[rank], bias)


def row(parts: bool, inputs: list[Tensor], layer: Any) -> Tensor:
    """The sum of a row's parts, and its bias."""
    columns = layer.weight.chunk(PARTS, 1)
    summands = [F.linear(x, weight) for x, weight in zip(inputs, columns, strict=True)]
    return Added.apply(parts, *summands) + layer.bias


def attention(module: Any, parts: bool, x: Tensor, documents: None = None) -> Tensor:
    heads = []
    for rank, entered in enumerate(Entered.apply(parts, x)):
        layers = (module.q, module.k, module.v)
        q, k, v = (module.split_heads(linear(entered, layer, rank)) for layer in layers)
        heads.append(module.core(q, k, v).transpose(1, 2).flatten(2))
    return row(parts, heads, module.o)


def mlp(module: Any, parts: bool, x: Tensor) -> Tensor:
    inner = [linear(one, module.up, rank) for rank, one in enumerate(Entered.apply(parts, x))]
    return row(parts, [F.gelu(one, approximate="tanh") for one in inner], module.down)


def embedding(module: Any, parts: bool, tokens: Tensor) -> Tensor:
    vectors = F.embedding(tokens, module.weight)
    first = (tokens < module.num_embeddings // PARTS)[..., None]
    halves = (vectors.masked_fill(~first, 0.0), vectors.masked_fill(first, 0.0))
    return Added.apply(parts, *halves)


def head(module: Any, parts: bool, x: Tensor) -> Tensor:
    entered = enumerate(Entered.apply(parts, x))
    return torch.cat([linear(one, module, rank) for rank, one in entered], -1)


def by_hand(model: Any, plan: Plan) -> nn.Module:
    """The model of one device that rounds where the ranks of a plan do."""
    if plan.tp.size > 1:
        parts = plan.tp.sequence_parallel
        model.embed.forward = partial(embedding, model.embed, parts)
        model.head.forward = partial(head, model.head, parts)
        for block in model.blocks:
            block.attention.forward = partial(attention, block.attention, parts)
            block.mlp.forward = partial(mlp, block.mlp, parts)
    if plan.pp.size > 1:
        whole = model.blocks[CUT].forward
        model.blocks[CUT].forward = lambda x: whole(Sent.apply(x))
    return model


def make() -> nn.Module:
    keys = MODELS["gpt"]
    with torch.device("meta"):
        return models.make("gpt", **{key: one for key, one in keys.items() if key != "name"})


def recorded(world: World, text: str, messages: Messages, model: nn.Module) -> RankRecord:
    plan = Plan.parse(f"{text} precision:float64")
    cutting = Cutting(counts=(CUT, 4 - CUT)) if plan.pp.size > 1 else Cutting()
    engine = build(
        model,
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=Options(messages=messages, cutting=cutting),
        world=world,
    )
    return record_rank(engine, batches(MODELS["gpt"], world), STEPS)


def on_ranks(world: World, text: str, messages: Messages) -> RankRecord:
    return recorded(world, text, messages, make())


def furthest(ranks: Run, text: str, messages: Messages, *, rounds: bool) -> float:
    """How far a plan is from one device, which rounds as the plan should or not at all."""
    plan = Plan.parse(text)
    alone = f"dp1 mb{plan.micro_batches}"
    model = by_hand(make(), plan) if rounds else make()
    truth = join(threaded(1, recorded, alone, "whole", model, plan=alone))
    own = join(ranks(plan.world_size, on_ranks, text, messages, plan=text))
    kinds = ("start", "loss", "grad", "grad_norm", "param")
    return max(one.error for one in differences(own, truth) if one.kind in kinds)


@pytest.mark.parametrize("text", PLANS)
def test_messages_are_rounded_where_one_device_by_hand_rounds(ranks: Run, text: str) -> None:
    assert furthest(ranks, text, "bf16", rounds=True) < TOLERANCE
    assert furthest(ranks, text, "bf16", rounds=False) > 1e-4


@pytest.mark.parametrize("text", PLANS)
def test_whole_messages_are_one_device(ranks: Run, text: str) -> None:
    assert furthest(ranks, text, "whole", rounds=False) < TOLERANCE
