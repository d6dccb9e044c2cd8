"""Copies and pickles of the model of an engine compute with their own parameters."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import plait


class Block(nn.Module):
    """A layer with an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.inner(input=hidden))


class Net(nn.Module):
    """Two blocks, as a plan recomputes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def trained(plan: str, **options: bool) -> Net:
    torch.manual_seed(0)
    model = Net()
    engine = plait.build(
        model,
        plan,
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=plait.Options(blocks="layers.*", **options),
    )
    engine.step((torch.ones(4, 8), torch.zeros(4, 8)))
    return model


def zeroed(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        param.detach().zero_()
    return model


PLANS = pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("dp1", {}),
        ("dp1 mb2 remat:full", {}),
        ("dp1 remat:selective", {}),
        ("dp1", {"offload_activations": True}),
        ("dp1 remat:full", {"offload_activations": True}),
    ],
)


@PLANS
def test_a_copy_computes_with_its_own_values(plan: str, options: dict[str, bool]):
    model = trained(plan, **options)
    inputs = torch.ones(4, 8)
    expected = model(inputs)
    copied = copy.deepcopy(model)
    assert copied(inputs).equal(expected)
    assert not zeroed(copied)(inputs).any()
    assert model(inputs).equal(expected)
    copied(inputs).sum().backward()
    assert all(param.grad is not None for param in copied.parameters())


@PLANS
def test_a_pickle_computes_with_its_own_values(plan: str, options: dict[str, bool]):
    model = trained(plan, **options)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    inputs = torch.ones(4, 8)
    assert loaded(inputs).equal(model(inputs))
    assert not zeroed(loaded)(inputs).any()


def test_an_average_of_weights_has_a_loss_of_its_own():
    model = trained("dp1")
    average = AveragedModel(model, avg_fn=lambda old, new, count: 0 * old)
    average.update_parameters(model)
    average.update_parameters(model)
    assert not average(torch.ones(4, 8)).any()


def test_a_forward_keeps_its_signature():
    model = trained("dp1 remat:full")
    assert list(inspect.signature(model.layers[0].forward).parameters) == ["hidden"]
    assert list(inspect.signature(model.layers[0].inner.forward).parameters) == ["input"]
