"""A moving average of the weights under every plan equals that of torch on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import plait
from plait.errors import OptimizerError
from tests.parity.harness import whole_model
from tests.parity.two_sets import AFTER, EVEN, PLANS, equals_one_device, goes_on

Run = Callable[..., list[Any]]
DECAY = 0.8


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # An eps above rounding: gradients of key biases are zero but for the order of sums.
    return torch.optim.AdamW(params, lr=0.02, eps=1e-5, weight_decay=0.1)


AVERAGED = plait.AveragedWeights(adamw, decay=DECAY)


def plainly() -> tuple[list[float], nn.Module]:
    model = whole_model(EVEN)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = adamw(model.parameters())
    told = []
    for inputs, targets in EVEN.batches(8):
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            outputs = average(inputs)
        averaged = F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        told += [loss.item(), averaged.item()]
    return told, average.module


@pytest.mark.parametrize("plan", PLANS)
def test_steps_and_averages_equal_one_device(ranks: Run, plan: str) -> None:
    equals_one_device(ranks, plan, AVERAGED, plainly)


@pytest.mark.parametrize("after", AFTER)
def test_a_checkpoint_goes_on_under_another_plan(ranks: Run, tmp_path: Path, after: str) -> None:
    goes_on(ranks, tmp_path / "saved", after, AVERAGED, plainly)


def test_a_parameter_that_is_used_later_is_averaged_as_torch_does() -> None:
    first = nn.Parameter(torch.ones(3, dtype=torch.float64))
    later = nn.Parameter(torch.ones(2, dtype=torch.float64))
    ours = plait.AveragedWeights(lambda params: torch.optim.AdamW(params, lr=0.1), decay=DECAY)
    optimizer = ours([first, later])
    plain = nn.ParameterList([first.detach().clone(), later.detach().clone()])
    others = torch.optim.AdamW(plain.parameters(), lr=0.1)
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(4):
        for params in ([first, later], [*plain]):
            params[0].grad = torch.full_like(params[0], 1.0 + step)
            params[1].grad = torch.full_like(params[1], 2.0) if step > 1 else None
        optimizer.step()
        others.step()
        average.update_parameters(plain)
    optimizer.eval()  # type: ignore[attr-defined]
    torch.testing.assert_close([first.detach(), later.detach()], [*average.module])
    optimizer.train()  # type: ignore[attr-defined]
    torch.testing.assert_close([first.detach(), later.detach()], [one.detach() for one in plain])


def test_what_is_no_average_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r"decay = 1\.0 .* from 0 to below 1"):
        plait.AveragedWeights(adamw, decay=1.0)
    with pytest.raises(OptimizerError, match=r"plait\.WholeTensors has whole tensors"):
        plait.AveragedWeights(plait.WholeTensors(adamw))
    with pytest.raises(OptimizerError, match=r"must return a .*returned a list"):
        plait.AveragedWeights(list)([])  # type: ignore[arg-type]


def test_a_scheduler_reaches_the_optimizer_inside() -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    rates = [{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": 0.2}]
    optimizer = plait.AveragedWeights(lambda _: torch.optim.SGD(rates))(params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for rate in (1.0, 0.5):
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        scheduler.step()
        moved = [(one - param).max().item() for one, param in zip(before, params, strict=True)]
        assert moved == pytest.approx([0.1 * rate, 0.2 * rate])
