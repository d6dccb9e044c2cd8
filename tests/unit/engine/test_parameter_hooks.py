"""A hook of a parameter sees the gradient of one micro-batch, which is told once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import plait


def build(model: nn.Module, plan: str = "mb2") -> plait.Engine:
    return plait.build(
        model,
        plan,
        loss=lambda output, targets: (output - targets).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


def test_a_hook_of_a_parameter_is_told():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    seen: list[torch.Tensor] = []
    model[1].weight.register_hook(lambda grad: seen.append(grad.clone()))
    with pytest.warns(
        UserWarning, match=r"'1\.weight' gets the gradient of each of 2 micro-batches"
    ):
        engine = build(model)
    inputs, targets = torch.ones(8, 2), torch.zeros(8, 1)
    expected = torch.autograd.grad(
        (model(inputs) - targets).square().mean(), model[1].weight, retain_graph=False
    )[0]
    seen.clear()
    engine.step((inputs, targets))
    assert len(seen) == 2
    torch.testing.assert_close(seen[0] + seen[1], expected)


def test_a_model_without_hooks_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(nn.Linear(2, 1))
        engine = build(nn.Linear(2, 1))
        engine.step((torch.ones(4, 2), torch.zeros(4, 1)))


def test_a_hook_of_an_undivided_batch_gets_the_gradient_of_the_mean_loss():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    seen: list[torch.Tensor] = []
    model[1].weight.register_hook(lambda grad: seen.append(grad.clone()))
    inputs, targets = torch.ones(8, 2), torch.zeros(8, 1)
    (expected,) = torch.autograd.grad((model(inputs) - targets).square().mean(), model[1].weight)
    seen.clear()
    engine = build(model, "dp1")
    engine.step((inputs, targets))
    torch.testing.assert_close(seen, [expected], rtol=0, atol=0)
