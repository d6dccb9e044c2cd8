"""Views of parameters outlive the units of ZeRO-3 that they are of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import build
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity.harness import TOLERANCE, join

VOCABULARY, LENGTH, WIDTH = 11, 6, 8


class Table(nn.Module):
    """Vectors of positions, as a view of all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH + 3, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[: ids.shape[1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return x + self.norm(self.layer(x)).tanh() * self.scale


class Returning(Block):
    """Returns a view of its scale too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.scale.view(1, 1, -1)


class Hidden:
    """A result of a class that torch's trees do not know."""

    def __init__(self, x: Tensor, scale: Tensor) -> None:
        self.x, self.scale = x, scale


class Hiding(Returning):
    def forward(self, x: Tensor) -> Any:
        return Hidden(*super().forward(x))


class Leaving(Block):
    """Leaves a view of its scale in an attribute."""

    seen: Tensor

    def forward(self, x: Tensor) -> Any:
        self.seen = self.scale.view(1, 1, -1)
        return super().forward(x)


class Tokens(nn.Module):
    """Blocks between an embedding and a head."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))


class Positions(Tokens):
    """A table of positions weighs what comes out of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, ids: Tensor) -> Tensor:
        places = self.table(ids)
        x = self.embed(ids) * places
        for block in self.blocks:
            x = block(x) * places
        return self.head(x)


class OfReturning(Tokens):
    block = Returning

    def forward(self, ids: Tensor) -> Tensor:
        x, scales = self.embed(ids), []
        for block in self.blocks:
            x, scale = block(x)
            scales.append(scale)
        return self.head(x * torch.stack(scales).prod(0))


class OfHiding(Tokens):
    block = Hiding

    def forward(self, ids: Tensor) -> Tensor:
        x, product = self.embed(ids), []
        for block in self.blocks:
            result = block(x)
            x = result.x
            product.append(result.scale)
        return self.head(x * product[0] * product[1])


class OfLeaving(Tokens):
    block = Leaving

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        for block in self.blocks:
            x = x * block.seen  # type: ignore[operator]
        return self.head(x)


class Fading(Block):
    """Returns a view of a table that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.table, self.table.view(1, 1, -1)


class OfFading(Tokens):
    """Writes into what its blocks return."""

    block = Fading

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x, table = block(x)
            if self.training:
                table.mul_(0.9)
        return self.head(x)


class Spread(Tokens):
    """Returns a view of a parameter for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(VOCABULARY) + 0.1)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.log_scale.expand(len(ids), -1)


class SpreadOfPart(Tokens):
    """Takes that parameter from a module of its own, without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.table.weight[:1].expand(len(ids), -1)


class Hooked(OfReturning):
    """Has hooks behind its blocks that return other tensors."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda _, args, output: (output[0] * 1.5, output[1]))


class Distribution(Spread):
    """Hides the view in a distribution."""

    def forward(self, ids: Tensor) -> Any:
        x, scale = super().forward(ids)
        return torch.distributions.Laplace(x, scale[:, None].expand_as(x), validate_args=False)


def loss_of(output: Any, targets: Tensor) -> Tensor:
    if isinstance(output, torch.distributions.Laplace):
        return -output.log_prob(F.one_hot(targets, VOCABULARY).double()).mean()
    if isinstance(output, tuple):
        logits, scale = output
        return F.cross_entropy(logits.transpose(1, 2), targets) + scale.square().mean()
    return F.cross_entropy(output.transpose(1, 2), targets)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (3, 8, LENGTH + 1), generator=generator)
    return [(one[:, :-1], one[:, 1:]) for one in ids]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def one_device(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of three steps and of an evaluation, and the parameters."""
    optimizer, losses = sgd(model.parameters()), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    inputs, targets = batches()[0]
    model.eval()
    losses.append(float(loss_of(model(inputs), targets).detach()))
    return losses, dict(model.named_parameters())


def on_rank(world: World, plan: str, model: nn.Module) -> Any:
    engine = build(
        copy.deepcopy(model),
        f"{plan} precision:float64",
        loss=loss_of,
        optimizer=sgd,
        world=world,
    )
    axis = world.axis("dp")
    own = [tuple(one.tensor_split(axis.size)[axis.rank] for one in pair) for pair in batches()]
    losses = [engine.step(batch, trace=False).loss for batch in own]
    losses.append(engine.evaluate(own[0]))
    parts = [
        (part.name, part.global_shape, part.index(), part.values.detach().clone())
        for part in engine.local_parameters()
    ]
    return losses, parts


KINDS = (Positions, OfReturning, OfHiding, OfLeaving, Spread, SpreadOfPart, Distribution)
CASES = [
    *[(kind, plan) for kind in KINDS for plan in ("dp2:zero3", "dp2:zero3 mb2")],
    (OfFading, "dp2:zero3"),
    *[(Positions, plan) for plan in ("dp2:zero3 remat:full", "dp2:zero3 tp2")],
    *[(kind, "pp2 dp2:zero3 mb2") for kind in (Positions, OfReturning, Hooked, OfLeaving, Spread)],
]


@pytest.mark.parametrize(("kind", "plan"), CASES)
def test_equals_one_device(kind: type[nn.Module], plan: str) -> None:
    torch.manual_seed(0)
    model = kind().double()
    results = threaded(Plan.parse(plan).world_size, on_rank, plan, model, plan=plan)
    losses, params = one_device(model)
    assert results[0][0] == pytest.approx(losses, rel=TOLERANCE)
    found = join([parts for _, parts in results])
    for name, expected in params.items():
        difference = (found[name] - expected.detach().flatten()).abs().max()
        assert difference < TOLERANCE * expected.abs().max(), name
