"""Buffers that a forward changes, under recomputation: the engine's are those of plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.stages.cut import Cutting
from plait.models.losses import cross_entropy
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]
STEPS = 2
NUM_MICRO_BATCHES = 4


class Spectral(nn.Module):
    """Divides by the largest singular value: reads a vector that it then writes into."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, size * size).reshape(size, size).sin())
        self.register_buffer("vector", torch.ones(size))
        self.register_buffer("mask", torch.ones(200, 50), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                product = self.weight.T @ (self.weight @ self.vector)
                self.vector.copy_(F.normalize(product, dim=0))
        size = (self.weight @ self.vector.clone()).norm()
        return F.linear(x, self.weight / size) * self.mask[0, 0]


class Centred(nn.Module):
    """Subtracts a moving mean, which every forward makes anew; and counts in a large table."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("table", torch.zeros(100, 100))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean + self.table[0, : x.shape[1]]
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            self.table += 0.125
        return y


def block(size: int) -> nn.Module:
    return nn.Sequential(Spectral(size), nn.BatchNorm1d(size), nn.Tanh(), Centred(size))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block(6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, 16, 6)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 6, shape[:2], generator=generator)
    return list(zip(inputs, targets, strict=True))


def model() -> nn.Module:
    return Net().to(torch.float64)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def plain() -> dict[str, Tensor]:
    """The state of one device after the steps, and the loss of an evaluation."""
    net = model()
    optimizer = sgd(net.parameters())
    for inputs, targets in batches():
        parts = (tensor.tensor_split(NUM_MICRO_BATCHES) for tensor in (inputs, targets))
        for x, y in zip(*parts, strict=True):
            (F.cross_entropy(net(x), y, reduction="sum") / len(targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    inputs, targets = batches()[0]
    with torch.no_grad():
        return {**net.state_dict(), "loss": F.cross_entropy(net(inputs), targets)}


def trained(world: World, plan: str) -> dict[str, Tensor]:
    """What this rank holds after the steps."""
    net = model()
    engine = build(
        net, f"{plan} precision:float64", loss=cross_entropy, optimizer=sgd,
        options=Options(blocks="layers.*", cutting=Cutting(example=batches()[0][0][:4])),
        world=world,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the forward carries")  # and it is meant so
        for batch in batches():
            engine.step(batch)
    loss = engine.evaluate(batches()[0])
    held = {part.name: part.values.view(part.global_shape) for part in engine.local_parameters()}
    owned = {name.rsplit(".", 2)[0] for name in held}
    kept = {
        name: buffer.clone()
        for name, buffer in net.named_buffers()
        if any(name.startswith(f"{layer}.") for layer in owned)
    }
    return {**held, **kept, "loss": torch.tensor(loss, dtype=torch.float64)}


def check(results: list[dict[str, Tensor]]) -> None:
    expected = plain()
    seen: set[str] = set()
    for found in results:
        seen |= found.keys()
        for name in found.keys() & expected.keys():
            error = (found[name] - expected[name]).abs().max()
            assert error <= TOLERANCE, (name, found[name], expected[name])
    assert seen >= expected.keys()


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("plan", ["dp1", "pp2:1f1b", "pp2:zb-h1"])
def test_buffers_are_those_of_plain_pytorch(ranks: Run, plan: str, policy: str) -> None:
    """A forward that is repeated reads the old values, and moves nothing once more."""
    num_ranks = 2 if plan.startswith("pp2") else 1
    text = f"{plan} mb{NUM_MICRO_BATCHES} remat:{policy}"
    check(ranks(num_ranks, trained, text, plan=text))
