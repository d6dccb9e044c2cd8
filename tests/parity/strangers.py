"""Modules, data and losses as somebody writes them who has not read this project's documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH = 23, 8, 16


class Block(nn.Module):
    """Attention over earlier positions, and a layer whose weight is made of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (2, -1)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """Takes a mapping by name and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, weight: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids) * weight[..., None]
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


def samples() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Samples of mappings, inputs and targets."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (48, LENGTH + 1), generator=generator)
    weight = torch.rand(48, LENGTH, generator=generator)
    return [
        ({"ids": line[:-1], "weight": share}, {"labels": line[1:]})
        for line, share in zip(ids, weight, strict=True)
    ]


def mean_loss(output: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """One number, the mean over all positions."""
    return F.cross_entropy(output["logits"].flatten(0, 1), targets["labels"].flatten())


class Scan(nn.Module):
    """A convolution that looks back, and a state that is carried from place to place."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.decay = nn.Parameter(torch.randn(WIDTH))
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        entering = self.enter(F.silu(mixed))
        state, states = torch.zeros_like(x[:, 0]), []
        for place in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + entering[:, place]
            states.append(state)
        return self.leave(torch.stack(states, 1))


@dataclass
class Answer:
    """What `Scanner` gives."""

    logits: Tensor


class Scanner(nn.Module):
    """Scans whose residual stream is outside of them, and an answer that is an object."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Scan() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Answer:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return Answer(self.head(x))


def lines() -> list[tuple[Tensor, Tensor]]:
    """Samples of tokens and of those that follow them."""
    return [(inputs["ids"], targets["labels"]) for inputs, targets in samples()]


def answer_loss(output: Answer, targets: Tensor) -> Tensor:
    """The mean over all positions."""
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


class Clamped(Scanner):
    """Scans after each of which the gradient is clamped."""

    def forward(self, ids: Tensor) -> Answer:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
            if x.requires_grad:
                x.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
        return Answer(self.head(x))


class Turns(nn.Module):
    """Layers that are called in an order of their own, and one of them twice; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for index in (2, 0, 1, 0):
            x = x + torch.tanh(self.layers[index](x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def labelled() -> list[tuple[dict[str, Tensor], Tensor]]:
    """Samples whose inputs hold the labels too."""
    return [({"ids": ids, "labels": following}, following) for ids, following in lines()]


def as_it_is(output: Tensor, targets: Tensor) -> Tensor:
    """The loss that the model has computed."""
    return output


class Hidden:
    """An object whose tensors nobody can find."""

    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Nothing(Scanner):
    """Hides what it computes."""

    def forward(self, ids: Tensor) -> Hidden:  # type: ignore[override]
        return Hidden(super().forward(ids).logits)


class Synced(nn.Module):
    """Batch norms over all ranks, between layers whose outputs are scores of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.SyncBatchNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(norm(layer(x)))
        return self.head(x)


def points() -> list[tuple[Tensor, Tensor]]:
    """Points and their classes."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(48, WIDTH, generator=generator)
    return [(point, (point[:4]).argmax()) for point in drawn]


def classes_loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over all points."""
    return F.cross_entropy(output, targets)


KINDS = {
    "Synced": ("points", "classes_loss"),
    "Nothing": ("lines", "answer_loss"),
    "Language": ("samples", "mean_loss"),
    "Clamped": ("lines", "answer_loss"),
    "Scanner": ("lines", "answer_loss"),
    "Turns": ("labelled", "as_it_is"),
}


def config(kind: str = "Language", **train: Any) -> dict[str, Any]:
    """The config of one of the modules."""
    data, loss = KINDS[kind]
    keys = {"global_batch": 12, "optimizer": "adamw", "lr": 1e-2, "loss": f"{__name__}:{loss}"}
    return {
        "model": {"python": f"{__name__}:{kind}"},
        "data": {"python": f"{__name__}:{data}"},
        "train": {**keys, **train},
        "plan": {"text": "dp1"},
    }
