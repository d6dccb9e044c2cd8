"""Blocks that are called inside a function with a backward of its own are refused under cp."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.engine.splitting import call_without_values
from plait.errors import ModelError
from plait.parallel.context.rehearsal import rehearse
from plait.parallel.context.trunk import Trunk

V = 13
D = 16


class Reversed(torch.autograd.Function):
    """A block whose backward computes it again, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.block = block
        return block(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.block(x).backward(grads[0])
        return x.grad, None


class Language(nn.Module):
    """Token numbers -> logits; `how` its blocks are called."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(D, V)
        self.how = how

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for block in self.blocks:
            if self.how == "reversed":
                x = Reversed.apply(x, block)
            elif self.how == "checkpoint":
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        return self.head(x)


def trunk_of(model: nn.Module) -> Trunk:
    example = torch.zeros(1, 8, dtype=torch.int64)
    run = partial(call_without_values, model, example)
    with torch.no_grad():  # a caller's own mode says nothing
        return rehearse(model, ["blocks.0", "blocks.1"], run, "ring", 2)


def test_the_block_is_named() -> None:
    words = r"'blocks.0' is called without autograd although '0.weight' is trained.*without cp"
    with pytest.raises(ModelError, match=words):
        trunk_of(Language("reversed"))


def test_what_is_frozen_and_what_torch_recomputes_are_taken() -> None:
    frozen = Language("reversed")
    frozen.blocks.requires_grad_(False)
    for model in (frozen, Language("checkpoint"), Language("plain")):
        assert set(trunk_of(model).blocks) == {"blocks.0", "blocks.1"}
