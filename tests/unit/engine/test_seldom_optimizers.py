"""Optimizers without a learning rate, and with a state of other kinds than tensors of floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import CheckpointError, OptimizerError


class Halving(torch.optim.Optimizer):
    """Has no learning rate, as A2Grad, or None, as transformers' Adafactor."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.5)


class Keeping(torch.optim.SGD):
    """Keeps a mask, a list and nothing, which each step reads."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["mask"] = param.grad > 0
                state["past"] = [torch.zeros_like(param), 0]
                state["none"] = None
                state["sizes"] = {"first": param.grad.abs().sum()}
            assert state["none"] is None
            past, count = state["past"]
            state["past"] = [past + param.grad, count + 1]
            param.sub_(torch.where(state["mask"], past + param.grad, param.grad) / (count + 1))
            param.sub_(1e-3 * state["sizes"]["first"])


class ByNumber(Keeping):
    """Keeps a dict by numbers, as AggMo does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param]["buffer"] = {0.9: torch.zeros_like(param)}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def built(make: Any, **options: Any) -> plait.Engine:
    torch.manual_seed(0)
    return plait.build(
        nn.Linear(5, 3),
        "dp1",
        loss=nn.MSELoss(),
        optimizer=make,
        options=plait.Options(**options),
    )


@pytest.mark.parametrize("wraps", [lambda make: make, plait.WholeTensors])
@pytest.mark.parametrize("settings", [{}, {"lr": None}])
def test_an_optimizer_without_a_rate_trains(settings: dict[str, Any], wraps: Any) -> None:
    engine = built(wraps(lambda params: Halving(params, **settings)))
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    for seed in range(3):
        inputs, targets = batch(seed)
        model.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.5)
        assert engine.step((inputs, targets)).loss == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("wraps", [lambda make: make, plait.WholeTensors])
def test_a_schedule_of_an_optimizer_without_a_rate_is_refused(wraps: Any) -> None:
    engine = built(wraps(Halving), learning_rate=lambda step: 0.5)
    with pytest.raises(OptimizerError, match="Halving has no learning rate in its groups"):
        engine.step(batch(0))


def test_masks_and_lists_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole = built(Keeping)
    losses = [whole.step(batch(seed)).loss for seed in range(4)]
    first = built(Keeping)
    for seed in range(2):
        first.step(batch(seed))
    first.save(tmp_path / "two")
    second = built(Keeping)
    second.load(tmp_path / "two")
    assert [second.step(batch(seed)).loss for seed in (2, 3)] == losses[2:]


def test_nothing_is_added_to_a_state_of_tensors(tmp_path: Path) -> None:
    """A load gave each parameter an entry without a name."""
    engine = built(torch.optim.AdamW)
    engine.step(batch(0))
    engine.save(tmp_path / "one")
    other = built(torch.optim.AdamW)
    other.load(tmp_path / "one")
    for state in other.update.optimizer.state.values():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_dict_by_numbers_is_refused(tmp_path: Path) -> None:
    engine = built(ByNumber)
    engine.step(batch(0))
    with pytest.raises(CheckpointError, match=r"'buffer' as a dict.*words as keys"):
        engine.save(tmp_path / "one")


def test_modes_that_fail_before_the_first_step_are_named() -> None:
    class Averaging(torch.optim.SGD):
        def train(self) -> None:
            pass

        def eval(self) -> None:
            for param in self.param_groups[0]["params"]:
                param.data.copy_(self.state[param]["ema"])

    with pytest.raises(OptimizerError, match=r"Averaging has train.*before the first step: KeyErr"):
        built(lambda params: Averaging(params, lr=0.1))
