"""Modules of many fields as others write them: images, graphs, recurrences, own backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH = 24, 8, 16


class UNet(nn.Module):
    """Two resolutions of an image with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 1))
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.leave = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        skip = F.silu(self.enter(image))
        inner = self.middle(self.down(skip))
        return self.leave(torch.cat([self.up(inner), skip], 1))


class Translator(nn.Module):
    """A GRU that reads, an LSTM that writes and looks back at what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * WIDTH, WIDTH)
        self.decoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen, _ = self.encoder(self.read(source))
        seen = self.bridge(seen)
        first = seen.mean(1)[None].contiguous()
        said, _ = self.decoder(self.write(target), (first, torch.zeros_like(first)))
        weights = (said @ seen.transpose(1, 2)).softmax(-1)
        return self.head(torch.cat([said, weights @ seen], -1))


class Residual(nn.Module):
    """A block of two convolutions with batch norms."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        shortcut = nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential() if into == out else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class Images(nn.Module):
    """A residual network with batch norms that classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1, self.layer2 = Residual(8, 8, 1), Residual(8, 16, 2)
        self.fc = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(image))).mean((2, 3)))


class Graph(nn.Module):
    """Messages along edges, summed where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.message = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.enter(nodes)
        source, target = (end[..., None].expand(-1, -1, WIDTH) for end in edges.unbind(-1))
        for layer in self.message:
            sent = layer(torch.cat([x.gather(1, source), x.gather(1, target)], -1)).relu()
            x = x + torch.zeros_like(x).scatter_add(1, target, sent)
        return self.leave(x.mean(1))


class TopOne(nn.Module):
    """Each position goes to one of four experts, chosen by indices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        flat = x.flatten(0, 1)
        share, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero().squeeze(-1)
            if places.numel():
                out = out.index_add(0, places, expert(flat[places]) * share[places, None])
        return self.head(x + out.view_as(x))


class TiedHead(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)).tanh())


class Spectral(nn.Module):
    """Weights of complex numbers on the frequencies of a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 12)
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft(self.enter(x)) * self.filter
        return self.leave(torch.fft.irfft(y, n=WIDTH).tanh())


class Moving(nn.Module):
    """A running mean in a buffer, which the output takes away."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 12)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return self.last((y - self.mean).tanh())


class Lists(nn.Module):
    """Parameters in a list and in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(12, 12) / 4 for _ in range(3))
        names = ("scale", "shift")
        self.ends = nn.ParameterDict({name: torch.ones(12) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight).tanh()
        return x * self.ends["scale"] + self.ends["shift"]


class Wave(nn.Module):
    """A language model of causal convolutions with holes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**n) for n in range(2))
        self.head = nn.Conv1d(WIDTH, VOCABULARY, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        for number, conv in enumerate(self.convs):
            value, gate = conv(F.pad(x, (2**number, 0))).chunk(2, 1)
            x = x + value.tanh() * gate.sigmoid()
        return self.head(x).transpose(1, 2)


class Siamese(nn.Module):
    """One encoder for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(one), self.encoder(other)


class Variational(nn.Module):
    """An autoencoder that draws its code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.spread = (nn.Linear(*sizes) for sizes in _ENCODER)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x).relu()
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * (spread / 2).exp()
        return self.decoder(code), mean, spread


_ENCODER = ((12, 32), (32, 4), (32, 4))


class Cell(nn.Module):
    """A recurrence written as a loop over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        state, states = x.new_zeros(len(x), WIDTH), []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state)
        return self.head(torch.stack(states, 1))


class LinearAttention(nn.Module):
    """Causal attention without a softmax, by running sums."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (2, -1)) for part in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bshd,bshe->bshde", k, v).cumsum(1)
        norm = torch.einsum("bshd,bshd->bsh", q, k.cumsum(1))
        mixed = torch.einsum("bshd,bshde->bshe", q, state) / norm[..., None]
        return self.head(x + self.out(mixed.flatten(2)))


class Hyper(nn.Module):
    """A network that makes the weights of another, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 12 * 8))
        self.last = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.maker(x[:, :4]).view(-1, 8, 12)
        return self.last((weights @ x[..., None]).squeeze(-1).tanh())


class Nested(nn.Module):
    """A list in a list as input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, values: list[Any]) -> list[Any]:
        one, (two, three) = values
        return [self.first(one).tanh(), [self.second(two + three)]]


class Bags(nn.Module):
    """Bags of integers beside numbers, as recommendations have them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.user = nn.EmbeddingBag(30, 8), nn.Embedding(10, 8)
        self.deep = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, items: Tensor, user: Tensor, dense: Tensor) -> Tensor:
        return self.deep(torch.cat([self.bag(items), self.user(user), dense], -1)).squeeze(-1)


class Square(torch.autograd.Function):
    """x² with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class OwnBackward(nn.Module):
    """Layers with a function between them that has its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Square.apply(layer(x)) - x
        return x


@dataclass
class Answer:
    """Logits, and a state that this model does not keep."""

    logits: Tensor
    state: Tensor | None = None


class Dataclass(nn.Module):
    """Gives a dataclass with a None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.layers(x))


class WithNone(nn.Module):
    """Gives a dict with a None; takes its inputs by keyword only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, *, x: Tensor, scale: Tensor) -> dict[str, Tensor | None]:
        return {"logits": self.layers(x) * scale[:, None], "cache": None}
