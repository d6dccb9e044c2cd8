"""A forward that writes into parameters, as the moving average of MoCo, under ZeRO."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.mesh import Shard
from tests.helpers.threaded import threaded


class Momentum(nn.Module):
    """Two encoders, of which one follows the other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.base = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 7))
        self.average = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 7))
        self.average.load_state_dict(self.base.state_dict())
        self.average.requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        pairs = zip(self.average.parameters(), self.base.parameters(), strict=True)
        for kept, param in pairs:
            if self.how == "new memory":
                kept.data = kept.data * 0.9 + param.data * 0.1
            elif self.how == "data":
                kept.data.mul_(0.9).add_((1 - 0.9) * param.detach().data)
            else:
                kept.lerp_(param, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        with torch.no_grad():
            self.follow()
            aim: Tensor = self.average(x.flip(1))
        return out - aim


class Bounded(nn.Module):
    """Two layers whose weights the forward bounds before it uses them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 12] -> [samples, 7]."""
        for layer in (self.first, self.last):
            if self.how == "data":
                layer.weight.data.clamp_(min=-0.05)
            else:
                with torch.no_grad():
                    layer.weight.clamp_(min=-0.05)
        out: Tensor = self.last(self.first(x).relu())
        return out


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 12, generator=draw), torch.zeros(8, 7)) for _ in range(4)]


def plain(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def split(world: World, models: Sequence[nn.Module], plan: str) -> tuple[list[float], list[Shard]]:
    sgd = lambda params: torch.optim.SGD(params, lr=0.5)  # noqa: E731
    model = models[world.rank]
    engine = plait.build(model, plan, loss=F.mse_loss, optimizer=sgd, world=world)
    losses = [engine.step(batch).loss for batch in engine.prepare(batches())]
    return losses, engine.local_parameters()


@pytest.mark.parametrize("how", ["new memory", "lerp", "data"])
def test_zero3_keeps_what_a_forward_writes(how: str) -> None:
    check_equal(*(Momentum(how) for _ in range(3)))


@pytest.mark.parametrize("how", ["no_grad", "data"])
def test_zero3_keeps_what_a_forward_writes_into_trained_parameters(how: str) -> None:
    check_equal(*(Bounded(how) for _ in range(3)))


def check_equal(whole: nn.Module, *models: nn.Module) -> None:
    losses = plain(whole)
    for found, shards in threaded(2, split, models, "dp2:zero3", plan="dp2:zero3"):
        assert found == pytest.approx(losses, rel=1e-5)
        for shard in shards:
            expected = whole.get_parameter(shard.name).detach().reshape(-1)[shard.index()]
            torch.testing.assert_close(shard.values.reshape(-1), expected.reshape(-1))
