"""Tensors that blocks take and leave beside their arguments and results reach other stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.errors import ModelError
from tests.helpers.sgd import drawn_batch, sgd_engine, three_losses
from tests.helpers.threaded import threaded

PLANS = ("pp2 mb1", "pp2:1f1b mb2", "pp2:zbv mb4", "dp2 pp2:1f1b mb2")


class Routed(nn.Module):
    """A block with the loss of its router."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(6, 6), nn.Linear(6, 2)

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Its result [batch, 6], and the mean of a square, which is a mean over samples."""
        gates = self.gate(x).softmax(-1)
        return x + self.linear(x).tanh() * gates[:, :1], gates.square().mean()


class InAttribute(Routed):
    aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x, self.aux = self.routed(x)
        return x


class InBuffer(Routed):
    aux: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("aux", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x, self.aux = self.routed(x)
        return x


class InDictionary(Routed):
    def forward(self, x: Tensor) -> Tensor:
        x, aux = self.routed(x)
        self.losses = {"router": aux, "twice": [2 * aux]}
        return x


class Summing(nn.Module):
    """The model adds up what its blocks left."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def aux_of(self, block: Any) -> Tensor:
        return block.aux if hasattr(block, "aux") else block.losses["twice"][0]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, torch.stack([self.aux_of(block) for block in self.blocks]).sum()


class Keeping(Summing):
    """The model leaves the sum in an attribute of its own, where the loss finds it."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x, self.total = super().forward(x)
        return x


class Leaving(Summing):
    """The loss asks the blocks themselves."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = block(x)
        return x

    @property
    def total(self) -> Tensor:
        return torch.stack([self.aux_of(block) for block in self.blocks]).sum()


class Scaled(nn.Module):
    """A block that finds a tensor in an attribute which the model sets."""

    context: dict[str, Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * self.context["scale"]


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        blocks: Any = self.blocks
        for block in blocks:
            block.context = {"scale": x.mean(-1, keepdim=True)}
        for block in self.blocks:
            x = block(x)
        return x


@lru_cache
def table(size: int) -> Tensor:
    return torch.linspace(0, 1, size, dtype=torch.float64)


class Tabled(Routed):
    """A block with constants that it keeps in attributes, and others that all blocks share."""

    width, scale = 0, table(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.width != x.shape[-1]:
            self.width = x.shape[-1]
            self.scale = torch.linspace(1, 2, self.width, dtype=x.dtype)
        return self.routed(x)[0] * self.scale + table(self.width)


class Repeated(nn.Module):
    """The same block, twice as deep as there are blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tabled() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attribute": lambda: Summing(InAttribute),
    "buffer": lambda: Summing(InBuffer),
    "dictionary": lambda: Summing(InDictionary),
    "attribute of the model": lambda: Keeping(InAttribute),
    "attribute for the loss": lambda: Leaving(InAttribute),
    "context": Telling,
    "tables": Repeated,
}


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def losses(world: World, models: list[nn.Module], plan: str) -> list[float]:
    model: Any = models[world.rank]

    def loss(output: Any, target: Tensor) -> Tensor:
        output, aux = output if isinstance(output, tuple) else (output, 0)
        return F.mse_loss(output, target) + 0.5 * (aux + getattr(model, "total", 0))

    return three_losses(sgd_engine(world, model, plan, loss, 0.5), drawn_batch(8))


def trained(kind: Callable[[], nn.Module], plan: str) -> list[float]:
    num_ranks = 4 if "dp2" in plan else 2 if "pp2" in plan else 1
    models = [made(kind) for _ in range(num_ranks)]
    return threaded(num_ranks, losses, models, plan, plan=plan)[0]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_what_blocks_leave_in_attributes_is_theirs_on_every_stage(name: str, plan: str) -> None:
    assert trained(MODELS[name], plan) == pytest.approx(trained(MODELS[name], "dp1"), rel=1e-12)


class Appending(Routed):
    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        x, aux = self.routed(x)
        losses.append(aux)
        return x


class Adding(Routed):
    def forward(self, x: Tensor, losses: Tensor) -> Tensor:
        x, aux = self.routed(x)
        losses += aux
        return x


class InMixedDictionary(Routed):
    def forward(self, x: Tensor) -> Tensor:
        x, aux = self.routed(x)
        self.losses: dict[str, Any] = {"twice": [2 * aux], "layers": 3}
        return x


class Collecting(nn.Module):
    """A model whose blocks write into something that they get."""

    def __init__(self, block: Callable[[], nn.Module], start: Callable[[], Any]) -> None:
        super().__init__()
        self.start = start
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        collected = self.start()
        for block in self.blocks:
            x = block(x, collected)
        return x, sum(collected)


class Returning(Collecting):
    """The same, with the list itself as a result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        collected = self.start()
        for block in self.blocks:
            x = block(x, collected)
        return x, collected


@pytest.mark.parametrize(
    "kind",
    [
        lambda: Collecting(Appending, list),
        lambda: Returning(Appending, list),
        lambda: Collecting(Adding, lambda: torch.zeros(1, dtype=torch.float64)),
    ],
)
def test_what_blocks_write_elsewhere_is_refused_where_a_later_stage_reads_it(kind: Any) -> None:
    with pytest.raises(ModelError, match=r"'blocks\.[01]' leaves a tensor outside its result"):
        trained(kind, "pp2 mb1")


def test_an_attribute_with_more_than_tensors_is_named() -> None:
    said = r"attribute with values that are no tensors.*attribute of the module that holds tensors"
    with pytest.raises(ModelError, match=said):
        trained(lambda: Summing(InMixedDictionary), "pp2 mb1")


def test_a_build_leaves_the_attributes_of_modules_as_they_were() -> None:
    blocks: list[Any] = []

    def build(world: World, models: list[nn.Module]) -> None:
        model: Any = models[world.rank]
        example = torch.zeros(1, 6, dtype=torch.float64)
        plait.build(
            model,
            "pp2 mb1 precision:float64",
            loss=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
            options=plait.Options(cutting=plait.Cutting(example=example)),
            world=world,
        )
        blocks.extend(model.blocks)

    threaded(2, build, [made(Repeated), made(Repeated)], plan="pp2 mb1")
    assert [block.width for block in blocks] == [0] * 4
    assert all(block.scale is table(1) for block in blocks)


class Counted(Routed):
    """A link of a chain with a number that its first forward replaces."""

    aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x, self.aux = self.routed(x)
        return x


def chain_losses(world: World, models: list[nn.Module], plan: str, last: int) -> list[float]:
    chain: Any = models[world.rank]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        own: Tensor = F.mse_loss(output, target) + chain[last].aux
        return own

    return three_losses(sgd_engine(world, chain, plan, loss, 0.5), drawn_batch(8))


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Counted() for _ in range(4)]).double()


@pytest.mark.parametrize("plan", ["pp2 mb1", "pp2:zbv mb2"])
def test_what_a_link_of_another_stage_leaves_is_refused(plan: str) -> None:
    with pytest.raises(ModelError, match=r"the attribute 'aux' of '1' is read on a rank of pp"):
        threaded(2, chain_losses, [chain(), chain()], plan, 1, plan=plan)


def test_what_a_link_of_the_last_stage_leaves_is_read() -> None:
    alone = threaded(1, chain_losses, [chain()], "dp1", 3, plan="dp1")[0]
    found = threaded(2, chain_losses, [chain(), chain()], "pp2 mb1", 3, plan="pp2 mb1")[0]
    assert found == pytest.approx(alone, rel=1e-12)


class Centred(nn.Module):
    """A model with a moving mean between its blocks: it is read before block `reads`."""

    mean: Tensor

    def __init__(self, reads: int, writes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.reads, self.writes = reads, writes
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index == self.reads:
                x = x - self.mean
            x = x + block(x)
            if index == self.writes:
                self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


def means(world: World, models: list[nn.Module], plan: str) -> tuple[list[float], list[float]]:
    found = losses(world, models, plan)
    mean: Tensor = models[world.rank].get_buffer("mean")
    return found, mean.tolist()


@pytest.mark.parametrize(("reads", "writes"), [(3, 2), (3, 3), (1, 0), (2, 0), (9, 0)])
def test_a_state_between_blocks_is_that_of_one_device(reads: int, writes: int) -> None:
    def kind() -> nn.Module:
        return Centred(reads, writes)

    alone = threaded(1, means, [made(kind)], "dp1", plan="dp1")[0]
    for found in threaded(2, means, [made(kind), made(kind)], "pp2 mb1", plan="pp2 mb1")[1:]:
        assert found[0] == pytest.approx(alone[0], rel=1e-12)
        assert found[1] == pytest.approx(alone[1], rel=1e-12)


@pytest.mark.parametrize(("reads", "writes"), [(0, 2), (0, 3), (1, 3)])
def test_a_state_that_an_earlier_stage_reads_is_refused(reads: int, writes: int) -> None:
    def kind() -> nn.Module:
        return Centred(reads, writes)

    with pytest.raises(ModelError, match=r"reads 'mean' for 'blocks\.\d' and writes it later"):
        trained(kind, "pp2 mb1")


class Turning(nn.Module):
    """A model that reads parts of a table between its blocks, and writes none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("table", torch.linspace(0, 1, 12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x * self.get_buffer("table")[: x.shape[-1]]).tanh()
        return x


def test_a_view_of_a_state_is_no_write() -> None:
    assert trained(Turning, "pp2 mb1") == pytest.approx(trained(Turning, "dp1"), rel=1e-12)
