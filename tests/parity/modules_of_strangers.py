"""Modules of kinds that strangers write: mixers, shared layers, experts in a list, short tables."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

VOCABULARY, LENGTH, WIDTH, SAMPLES = 26, 8, 16, 32


class MixerBlock(nn.Module):
    """An MLP over the patches of an image, and one over their features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.patches = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.features = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.features(self.norm2(x))


class Mixer(nn.Module):
    """Classifies images by their patches."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList(MixerBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.enter(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Two of four experts for each token, beside one that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.shared = Expert()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = self.shared(flat)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out = out.index_add(0, token, expert(flat[token]) * weights[token, choice, None])
        return out.view_as(x)


class MixtureBlock(nn.Module):
    """Attention, then a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mixture(self.norm2(x))


class Experts(nn.Module):
    """A language model with mixtures of experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MixtureBlock() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Looking(nn.Module):
    """Six heads of queries and two of keys, turned by their places, in sums written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(24)
        self.q, self.kv = nn.Linear(24, 24), nn.Linear(24, 16)
        self.out = nn.Linear(24, 24)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (6, 4))
        k, v = self.kv(y).unflatten(-1, (2, 2, 4)).unbind(2)
        q, k = (
            torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            for a, b in (part.chunk(2, -1) for part in (q, k))
        )
        k, v = (part.repeat_interleave(3, 2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(4)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return x + self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


class Short(nn.Module):
    """Has tables for eight positions, and takes no longer sequence."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(27, 24)
        self.blocks = nn.ModuleList(Looking() for _ in range(2))
        self.head = nn.Linear(24, 27)
        turns = torch.outer(torch.arange(float(LENGTH)), torch.tensor([1.0, 0.1]))
        self.register_buffer("cos", turns.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", turns.sin()[None, :, None], persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, length = self.embed(ids), ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:, :length], self.sin[:, :length])
        return self.head(x)


class Shared(nn.Module):
    """One layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = self.layer(x)
        return self.head(x)


class Scaled(nn.Module):
    """Blocks whose results a parameter of the model scales, and a weight that is taken by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(x) @ (self.embed.weight @ self.embed.weight.T).tanh()


class Normed(nn.Module):
    """Layers whose weights are computed, one by an iteration that every read goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Turn(nn.Module):
    """Turns pairs of features by complex numbers that are kept as real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.turns = nn.Parameter(torch.randn(WIDTH // 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.enter(x).unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * torch.view_as_complex(self.turns)
        return x + self.leave(torch.view_as_real(turned).flatten(-2))


class Turning(nn.Module):
    """A language model of turns, which no attention follows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.turns = nn.ModuleList(Turn() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for turn in self.turns:
            x = turn(x)
        return self.head(x)


class Weighed(Turning):
    """Has a convolution whose weight an old function of torch computes before each forward."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.turns.append(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)))


class Encoder(nn.Module):
    """An encoder of torch's own, with places for twelve positions and a mask of later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(1, 12, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.places.dtype)
        x = self.embed(ids) + self.places[:, :length]
        return self.head(self.layers(x, mask=later, is_causal=True))


class Flattened(Turning):
    """Takes the statistics of a batch norm over all positions of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for turn in self.turns:
            x = self.norm(turn(x).flatten(0, 1)).view_as(x)
        return self.head(x)


class Contrast(Turning):
    """Compares the mean of each sequence with those of all others."""

    def forward(self, ids: Tensor) -> Tensor:
        means = F.normalize(super().forward(ids).mean(1), dim=-1)
        return means @ means.T


class Several(nn.Module):
    """Gives logits of each position, all hidden states, and the class of a whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.heads = nn.ModuleDict(
            {"next": nn.Linear(WIDTH, VOCABULARY), "kind": nn.Linear(WIDTH, 3)}
        )

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x, hidden = self.embed(ids), []
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        outputs = {"kind": self.heads["kind"](x.mean(1))}
        return {"logits": self.heads["next"](x), "hidden": hidden, "more": outputs}


class Named(Several):
    """A block that the model has under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.layers[1]

    def forward(self, ids: Tensor) -> Tensor:
        return self.heads["next"](self.last(self.layers[0](self.embed(ids))))


class Packed(nn.Module):
    """Two LSTM that read all but the last token, as a `PackedSequence` that goes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = torch.full((len(ids),), LENGTH - 1)
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True)
        for layer in self.layers:
            packed, _ = layer(packed)
        x, _ = pad_packed_sequence(packed, batch_first=True, total_length=LENGTH)
        return self.head(x)


def lines() -> list[tuple[Tensor, Tensor]]:
    """Samples of tokens and of those that follow them."""
    shape = (SAMPLES, LENGTH + 1)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(3))
    return [(line[:-1], line[1:]) for line in ids]


def images() -> list[tuple[Tensor, Tensor]]:
    """Samples of images and their classes."""
    generator = torch.Generator().manual_seed(4)
    pixels = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
    return list(zip(pixels, torch.randint(0, 10, (SAMPLES,), generator=generator), strict=True))


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over all positions."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def class_loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over samples."""
    return F.cross_entropy(output, targets)


def nearest_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Each sequence is nearest to itself."""
    return F.cross_entropy(output, torch.arange(len(output), device=output.device))


def several_losses(output: dict[str, Any], targets: Tensor) -> Tensor:
    """Of all outputs."""
    more = output["more"]["kind"].logsumexp(-1).mean()
    squares = sum(hidden.pow(2).mean() for hidden in output["hidden"])
    return token_loss(output["logits"], targets) + 0.1 * more + squares


def config(kind: type[nn.Module]) -> dict[str, Any]:
    """The config of one of the modules."""
    own = {
        Mixer: ("images", "class_loss"),
        Several: ("lines", "several_losses"),
        Contrast: ("lines", "nearest_loss"),
    }
    data, loss = own.get(kind, ("lines", "token_loss"))
    train = {"global_batch": 8, "optimizer": "sgd", "lr": 0.1, "loss": f"{__name__}:{loss}"}
    return {
        "model": {"python": f"{__name__}:{kind.__name__}"},
        "data": {"python": f"{__name__}:{data}"},
        "train": train,
        "plan": {"text": "dp1"},
    }
