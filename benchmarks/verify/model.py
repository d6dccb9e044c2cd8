"""A small transformer, a perceptron and a convolution net, each with knobs for how it computes.

The knobs of `How` stand for what parallel code does: products in parts that are summed, keys met
block by block. Some of them are faults. With the defaults a model is plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
HEADS = 4
VOCABULARY = 24
LENGTH = 6
CLASSES = 5


@dataclass
class How:
    """How products and attention are computed: right ways first, then faults."""

    parts: int = 1  # of a product's inner dim, each summed as tensor parallelism does
    blocks: int = 1  # of keys, met one after the other as a ring does
    lost_part: bool = False
    bias_each: bool = False
    no_rescale: bool = False
    scale: float = 1.0  # of attention's scores
    wrong_slope: bool = False
    eps: float = 1e-5


class Row(nn.Linear):
    """A linear layer whose inner dim may be cut in parts."""

    how = How()

    def forward(self, value: Tensor) -> Tensor:
        how = self.how
        if how.parts == 1:
            return super().forward(value)
        columns = self.weight.tensor_split(how.parts, dim=1)
        inputs = value.tensor_split(how.parts, dim=-1)
        products = [one @ weight.T for one, weight in zip(inputs, columns, strict=True)]
        if how.lost_part:
            products = products[:-1]
        total = products[0]
        for product in products[1:]:
            total = total + product
        return total + self.bias * (how.parts if how.bias_each else 1)


class Slope(torch.autograd.Function):
    """A tanh whose backward forgets its slope."""

    @staticmethod
    def forward(ctx, value):
        return torch.tanh(value)

    @staticmethod
    def backward(ctx, grad):
        return grad


def activation(value: Tensor, how: How) -> Tensor:
    return Slope.apply(value) if how.wrong_slope else torch.tanh(value)


def attention(query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
    """Causal attention, [samples, heads, tokens, features]; with blocks as a ring meets them."""
    query = query * how.scale
    if how.blocks == 1:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    places = torch.arange(query.shape[2])
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = scores.masked_fill(places[None] > places[:, None], -1e4)
    top = total = output = None
    for part, rows in zip(
        scores.tensor_split(how.blocks, dim=-1), value.tensor_split(how.blocks, dim=2), strict=True
    ):
        here = part.max(dim=-1, keepdim=True).values
        if top is None:
            top = here
            weights = (part - top).exp()
            total = weights.sum(dim=-1, keepdim=True)
            output = weights @ rows
            continue
        new = torch.maximum(top, here)
        old = torch.ones_like(new) if how.no_rescale else (top - new).exp()
        weights = (part - new).exp()
        total = total * old + weights.sum(dim=-1, keepdim=True)
        output = output * old + weights @ rows
        top = new
    return output / total


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.how = How()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = Row(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = Row(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        eps = self.how.eps
        heads = (samples, tokens, HEADS, WIDTH // HEADS)
        normed = F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias, eps)
        query, key, value = (
            one.view(heads).transpose(1, 2) for one in self.qkv(normed).chunk(3, -1)
        )
        met = attention(query, key, value, self.how)
        x = x + self.out(met.transpose(1, 2).reshape(x.shape))
        return x + self.down(activation(self.up(self.norm2(x)), self.how))


class Transformer(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.how = How()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Perceptron(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.how = How()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Row(WIDTH, WIDTH) for _ in range(depth))
        self.head = Row(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(activation(x, self.how))
        return self.head(x)


class Convolutions(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.how = How()
        widths = [2] + [6] * (depth + 1)
        pairs = pairwise(widths)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.head = Row(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = activation(layer(x), self.how)
        return self.head(x.mean(dim=(2, 3)))


FAMILIES = {"transformer": Transformer, "perceptron": Perceptron, "convolutions": Convolutions}


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over targets that are not masked."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def data(family: str, samples: int, steps: int, masked: bool) -> list[tuple[Tensor, Tensor]]:
    """Batches of random samples; masked ones have targets that do not count."""
    found = []
    for _ in range(steps):
        if family == "transformer":
            inputs = torch.randint(0, VOCABULARY, (samples, LENGTH))
            targets = torch.randint(0, VOCABULARY, (samples, LENGTH))
            if masked:
                targets[: samples // 3, LENGTH // 2 :] = -100
        else:
            shape = (samples, 8) if family == "perceptron" else (samples, 2, 6, 6)
            inputs = torch.randn(shape)
            targets = torch.randint(0, CLASSES, (samples,))
        found.append((inputs, targets))
    return found


def set_how(model: nn.Module, how: How) -> None:
    """Let every module compute in this way."""
    for module in model.modules():
        if hasattr(module, "how"):
            module.how = how
