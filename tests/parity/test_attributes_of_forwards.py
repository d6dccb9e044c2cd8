"""Models whose forward keeps values in plain attributes: a count of its calls, a table of turns."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import build
from plait.models import losses
from plait.plan import Plan
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]
PLANS = ["dp2:zero3", "tp2", "tp4:2d", "cp2:ring", "cp2:ulysses"]
WIDTH, HEADS, LENGTH = 16, 4, 8


class Attention(nn.Module):
    """Causal attention by hand, of positions that are turned as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.qkv(x).chunk(3, -1))
        q, k = (self.turned(part, turns).transpose(1, 2) for part in (q, k))
        score = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + mask
        return self.out((score.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2))

    def turned(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns[:, None]).flatten(3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Attention()
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        x = x + self.mixer(x, turns, mask)
        return x + self.mlp(x)


class Warming(nn.Module):
    """Logits that grow with the number of forwards, as in a schedule that a model keeps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)
        angles = torch.outer(torch.arange(LENGTH), torch.tensor([1.0, 0.1])).double()
        self.turns = torch.polar(torch.ones_like(angles), angles)
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(ids.shape[1])
        x = self.embed(ids)
        self.turns = self.turns.to(x.device)
        turns = self.turns[: ids.shape[1]]
        mask = x.new_full((ids.shape[1], ids.shape[1]), -math.inf).triu(1)
        for layer in self.layers:
            x = layer(x, turns, mask)
        return self.head(x) * len(self.seen) / (1 + self.calls)


class Collecting(nn.Module):
    """Logits of what the first layer gave, which a hook notes; the first forward registers it, as
    those of `transformers` do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 32)
        self.has_hooks = False
        self.tables: dict[str, int] = {}

    def forward(self, ids: Tensor) -> Tensor:
        if not self.has_hooks:
            for layer in self.layers:
                layer.register_forward_hook(_collect)
            self.has_hooks = True
        self.tables["forwards"] = self.tables.get("forwards", 0) + 1
        x = self.embed(ids)
        given: list[Tensor] = []
        with collected(given):
            for layer in self.layers:
                x = layer(x).tanh()
        return self.head(x + given[1]) * self.tables["forwards"]


COLLECTED: ContextVar[list[Tensor] | None] = ContextVar("COLLECTED", default=None)


@contextmanager
def collected(given: list[Tensor]) -> Iterator[None]:
    """Hooks add what layers give to this list."""
    token = COLLECTED.set(given)
    try:
        yield
    finally:
        COLLECTED.reset(token)


def _collect(module: nn.Module, inputs: object, given: Tensor) -> None:
    noted = COLLECTED.get()
    if noted is not None:
        noted.append(given)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 32, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def on_rank(world: World, plan: str, model: nn.Module) -> tuple[list[float], dict[str, Any]]:
    engine = build(
        copy.deepcopy(model),
        f"{plan} precision:float64",
        loss=losses.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        world=world,
    )
    axis = world.axis("dp")
    share = [part.tensor_split(axis.size)[axis.rank] for part in batch()]
    losses_of_steps = [engine.step((share[0], share[1]), trace=False).loss for _ in range(3)]
    names = ("calls", "turns")
    return losses_of_steps, {name: getattr(engine.model, name, None) for name in names}


def one_device(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch()
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_forwards_of_the_build_leave_attributes_as_they_were(ranks: Run, plan: str) -> None:
    torch.manual_seed(0)
    model = Warming().double()
    expected = one_device(copy.deepcopy(model))
    for found, left in ranks(Plan.parse(plan).world_size, on_rank, plan, model, plan=plan):
        assert found == pytest.approx(expected, rel=TOLERANCE)
        assert left["calls"] == 3
        torch.testing.assert_close(left["turns"], model.turns)


@pytest.mark.parametrize("plan", ["dp2:zero3", "tp2", "tp4:2d", "pp3 mb1"])
def test_hooks_that_the_first_forward_registers_are_there_once(ranks: Run, plan: str) -> None:
    torch.manual_seed(0)
    model = Collecting().double()
    expected = one_device(copy.deepcopy(model))
    for found, _ in ranks(Plan.parse(plan).world_size, on_rank, plan, model, plan=plan):
        assert found == pytest.approx(expected, rel=TOLERANCE)
