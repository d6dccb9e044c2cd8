"""Attention and layers whose code drops numbers between what is split and what sums it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parity.attention_of_strangers import (
    HEADS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Masked,
    Transformer,
)
from tests.parity.attention_of_strangers import config as config_of


class Dropped(Masked):
    """Weights by hand, dropped by a module that drops the output too."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def drop(self, weights: Tensor) -> Tensor:
        return self.dropout(weights)

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values [samples, heads, positions, head size]."""
        batch, length, width = x.size()
        shape = (batch, length, self.n_head, width // self.n_head)
        made = [layer(x) for layer in (self.query, self.key, self.value)]
        return [one.view(*shape).transpose(1, 2) for one in made]

    def mixed(self, x: Tensor) -> Tensor:
        """What heads have seen [samples, heads, positions, head size]."""
        q, k, v = self.heads(x)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, : len(x[0]), : len(x[0])] == 0, -torch.inf)
        return self.drop(scores.softmax(-1)) @ v

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.proj(self.mixed(x).transpose(1, 2).contiguous().view(x.shape)))


class Functional(Dropped):
    """Weights dropped by a function, and the output by another call of it."""

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, p=0.2, training=self.training)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(self.mixed(x).transpose(1, 2).contiguous().view(x.shape))
        return F.dropout(y, 0.1, self.training)


class InPlace(Functional):
    """Weights dropped where they lie."""

    def drop(self, weights: Tensor) -> Tensor:
        kept = weights.clone()
        F.dropout(kept, 0.2, self.training, True)
        return kept


class Fused(Functional):
    """Torch's function of attention drops the weights."""

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        rate = 0.2 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)


class Grouped(Functional):
    """The same with a bias that is learned by head, and heads of keys for several of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.n_keys = HEADS // 2
        self.bias = nn.Parameter(torch.linspace(-1, 1, HEADS * LENGTH**2).view(HEADS, LENGTH, -1))

    def mixed(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        size = width // HEADS
        q = self.query(x).view(batch, length, self.n_head, size).transpose(1, 2)
        k, v = (
            layer(x).view(batch, length, self.n_keys, size).transpose(1, 2)
            for layer in (self.key, self.value)
        )
        bias = self.bias.masked_fill(self.mask[0] == 0, -torch.inf)
        rate = 0.2 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, bias, rate, scale=0.3, enable_gqa=True)


class Padded(Functional):
    """The same with keys that are not seen, and queries that see nothing."""

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        seen = self.mask.bool().clone()
        seen[..., 0, :] = False
        rate = 0.2 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=rate)


class Again(Functional):
    """A function within the forward is computed again in backward."""

    def drop(self, weights: Tensor) -> Tensor:
        return checkpoint(super().drop, weights, use_reentrant=False)


class Widened(Functional):
    """Weights of heads are dropped, and then a whole value of as many dims."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.dropout(y.unsqueeze(1), 0.1, self.training).squeeze(1)


class TwoWays(Functional):
    """Keys are dropped where heads are dim 2, and weights where they are dim 1."""

    def heads(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().heads(x)
        return [q, F.dropout(k.transpose(1, 2), 0.1, self.training).transpose(1, 2), v]


class Learned(nn.Module):
    """Queries of three dims are learned, and keys have four."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.queries = nn.Parameter(torch.linspace(-1, 1, LENGTH * WIDTH).view(HEADS, -1, size))
        self.key, self.value, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], HEADS, x.shape[2] // HEADS)
        k, v = (layer(x).view(heads).transpose(1, 2) for layer in (self.key, self.value))
        rate = 0.2 if self.training else 0.0
        y = F.scaled_dot_product_attention(self.queries, k, v, dropout_p=rate)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class Infinite(Functional):
    """What is added to scores is minus infinity, and a query sees nothing; all else is dropped."""

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        bias = torch.zeros_like(self.mask).masked_fill(self.mask == 0, -torch.inf)
        bias[..., 0, :] = -torch.inf
        rate = 0.2 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, bias.to(x.dtype), rate)
        return y + F.dropout(y, 1.0, self.training)


class Biased(Functional):
    """A bias of heads without samples is dropped too."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(
            torch.linspace(-1, 1, HEADS * LENGTH**2).view(1, HEADS, LENGTH, -1)
        )

    def drop(self, weights: Tensor) -> Tensor:
        bias = F.dropout(self.bias, 0.2, self.training)
        return super().drop(weights * bias.exp())


class Layers(nn.Module):
    """A hidden layer whose features a function drops, and then what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden layer [samples, positions, 4 width]."""
        return F.dropout(self.up(x).relu(), 0.3, self.training)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.hidden(x))
        return F.dropout(y, 0.1, self.training)


class Called(nn.Module):
    """A method of a child is called, and not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers.down(self.hidden(self.layers, x))

    @staticmethod
    def hidden(layers: Layers, x: Tensor) -> Tensor:
        return layers.hidden(x)


class Rest(nn.Module):
    """What follows a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(x.relu(), 0.3, self.training))


class Halfway(nn.Module):
    """What follows a hidden layer is computed again in backward, and begins with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.rest = nn.Linear(WIDTH, 4 * WIDTH), Rest()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.rest, self.up(x), use_reentrant=False)


class RowFirst(nn.Module):
    """A block that begins with dropout, and names its row before its column."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.drop(x)).relu())


class RowsFirst(nn.Module):
    """Such blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.Sequential(RowFirst(), RowFirst())

    def forward(self, ids: Tensor) -> Tensor:
        """[samples, positions] -> logits [samples, positions, vocabulary]."""
        return self.head(self.blocks(self.embed(ids)))


class Half(nn.Module):
    """Half a feed-forward layer, behind what is dropped of its input."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.3), nn.Linear(*widths)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.drop(x)).relu()


class Halves(RowsFirst):
    """A block has the column of a pair, and the next one its row."""

    def __init__(self) -> None:
        super().__init__()
        wide = (WIDTH, 4 * WIDTH)
        self.blocks = nn.Sequential(Half(*wide), Half(*wide[::-1]), Half(*wide), Half(*wide[::-1]))


class Kept(nn.Module):
    """A hidden layer that a module drops where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x) * 1
        self.drop(hidden)
        return self.down(hidden)


class Straight(nn.Module):
    """Layers without blocks, which a pipeline cuts between a column and its row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """[samples, positions] -> logits [samples, positions, vocabulary]."""
        hidden = F.dropout(self.up(self.embed(ids)).relu(), 0.3, self.training)
        return self.head(self.down(self.drop(hidden)))


class Beside(nn.Module):
    """A whole value is dropped behind a layer whose output would be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.drop(x.tanh()) + self.down(hidden.relu())


class OfBeside(Transformer):
    attention = Beside


class OfKept(Transformer):
    attention = Kept


class OfDropped(Transformer):
    attention = Dropped


class OfFunctional(Transformer):
    attention = Functional


class OfInPlace(Transformer):
    attention = InPlace


class OfFused(Transformer):
    attention = Fused


class OfGrouped(Transformer):
    attention = Grouped


class OfPadded(Transformer):
    attention = Padded


class OfAgain(Transformer):
    attention = Again


class OfWidened(Transformer):
    attention = Widened


class OfTwoWays(Transformer):
    attention = TwoWays


class OfLearned(Transformer):
    attention = Learned


class OfInfinite(Transformer):
    attention = Infinite


class OfBiased(Transformer):
    attention = Biased


class OfCalled(Transformer):
    attention = Called


class OfHalfway(Transformer):
    attention = Halfway


class OfLayers(Transformer):
    attention = Layers


def config(kind: type[nn.Module]) -> dict[str, Any]:
    """The config of one of the models."""
    found = config_of(kind)
    found["model"] = {"python": f"{__name__}:{kind.__name__}"}
    if kind is Straight:
        found["plan"] = {"text": "dp1", "splits": ["down"]}
    return found
