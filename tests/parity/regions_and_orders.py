"""Modules whose code recomputes parts of a forward, or calls layers in changing orders."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parity.kinds_of_modules import VOCABULARY, WIDTH


class Checkpointed(nn.Module):
    """Blocks that compute their forward again in the backward, as old code asks for it."""

    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class Recomputed(Checkpointed):
    """All blocks and the code between them in one region that is computed again."""

    def forward(self, ids: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x).tanh()
            return x

        return self.head(checkpoint(body, self.embed(ids), use_reentrant=self.reentrant))


class RecomputedAnew(Recomputed):
    """The way that torch recommends now."""

    reentrant = False


class CheckpointedAnew(Checkpointed):
    """The way that torch recommends now."""

    reentrant = False


class Shuffled(nn.Module):
    """Layers in an order that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number in random.sample(range(4), 4):
            x = x + self.layers[number](x).tanh()
        return x


class Swapped(nn.Module):
    """Two layers of one size, whose order the sign of the inputs decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        order = (0, 1, 2) if x[0, 0] > 0 else (0, 2, 1)
        for number in order:
            x = x + self.layers[number](x).tanh()
        return x


class Trunk(torch.autograd.Function):
    """Layers without a graph, computed again in the backward, as reversible networks do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layers = layers
        return _through(x, layers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            output = _through(x, ctx.layers)
        output.backward(grad)
        return x.grad, None


def _through(x: Tensor, layers: nn.ModuleList) -> Tensor:
    for layer in layers:
        x = x + layer(x).tanh()
    return x


class Reversible(nn.Module):
    """All blocks inside a function of autograd that the model brings with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Trunk.apply(self.embed(x), self.layers)
        return output


class Cycles(nn.Module):
    """Blocks that first run without autograd, and then once with it, as hierarchical reasoning
    models do it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        with torch.no_grad():
            start = _through(x, self.layers)
        return _through(x + start, self.layers)
