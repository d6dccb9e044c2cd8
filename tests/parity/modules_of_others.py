"""More modules as others write them: closures, complex tables, weights taken twice, own draws."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH = 24, 8, 16
SAMPLES = 32


class Lambda(nn.Module):
    """Blocks that keep a function of their own layers in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    @staticmethod
    def block() -> nn.Module:
        block: Any = nn.ModuleDict({"up": nn.Linear(WIDTH, 32), "down": nn.Linear(32, WIDTH)})
        block.mlp = lambda x: block.down(F.gelu(block.up(x)))
        return block

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer.mlp(x)
        return self.head(x)


class Recurrent(nn.Module):
    """An LSTM whose output lies turned in memory, and dropout on it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.drop(self.rnn(self.drop(self.embed(ids)))[0]))


class Unblocked(nn.Module):
    """No two layers are alike, and parameters of the model itself lie before and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.1)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.tokens)
        return (x + self.scale * self.down(self.up(x).relu())) @ self.tokens.T


class Rotary(nn.Module):
    """Positions turn pairs of features, as complex numbers from a buffer."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        angles = torch.outer(torch.arange(64.0), 10.0 ** -torch.arange(WIDTH / 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            pairs = torch.view_as_complex(layer(x).unflatten(-1, (-1, 2)))
            x = x + torch.view_as_real(pairs * self.turns[: x.shape[1]]).flatten(-2).tanh()
        return self.head(x)


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = nn.Linear(12, 8), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.enter(x).relu()).relu()
        return F.linear(y, self.enter.weight.t(), self.bias)


class Dropping(nn.Module):
    """Dropout between two layers, as a module and as a function, and noise on what comes out."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 12)
        self.first = nn.Sequential(*layers)
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.down(F.dropout(self.up(x).relu(), 0.5, self.training))
        return x + y * torch.rand_like(y)


class Plain(nn.Module):
    """Dropout in a sequence of layers that a pipeline cuts between them."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5)
        ends = nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.5)
        self.layers = nn.Sequential(*ends, *inner, nn.Linear(32, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Skipping(nn.Module):
    """Layers that Python's own random numbers leave out, and numpy's scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() < 0.7:
                scale = numpy.random.uniform(0.5, 1.5) if self.training else 1.0
                x = x + scale * layer(x).relu()
        return x


class Frozen(nn.Module):
    """A backbone with a batch norm that does not train, behind it a head that does."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)
        self.backbone = nn.Sequential(*layers).requires_grad_(False)
        self.head = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


def lines() -> list[tuple[Tensor, Tensor]]:
    """Samples of tokens and of those that follow them."""
    shape = (SAMPLES, LENGTH + 1)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(3))
    return [(line[:-1], line[1:]) for line in ids]


def points() -> list[tuple[Tensor, Tensor]]:
    """Samples that are their own targets."""
    values = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(4))
    return [(value, value) for value in values]


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over all positions."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def distance(output: Tensor, targets: Tensor) -> Tensor:
    """The mean square."""
    return F.mse_loss(output, targets.to(output.dtype))


POINTS = (Tied, Frozen, Dropping, Plain, Skipping)


def config(kind: type[nn.Module]) -> dict[str, Any]:
    """The config of one of the modules."""
    data, loss = ("points", "distance") if kind in POINTS else ("lines", "token_loss")
    train = {"global_batch": 8, "optimizer": "sgd", "lr": 0.1, "loss": f"{__name__}:{loss}"}
    return {
        "model": {"python": f"{__name__}:{kind.__name__}"},
        "data": {"python": f"{__name__}:{data}"},
        "train": train,
        "plan": {"text": "dp1"},
    }
