"""Optimizers that update a parameter by the gradients of others, where a rank has some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plait
from plait.errors import OptimizerError
from plait.parallel.data import require_apart
from tests.helpers.threaded import threaded
from tests.parity.few_steps import batch, drawn
from tests.parity.test_draws_of_updates import Noisy

WIDTH = 6


class Clipping(torch.optim.SGD):
    """Clips by the norm of all gradients within its step, as LAMB and Adan do."""

    def __init__(self, params: Any, most: float) -> None:
        super().__init__(params, lr=0.1)
        self.most = most

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        own = [param for group in self.param_groups for param in group["params"]]
        nn.utils.clip_grad_norm_(own, self.most)
        return super().step(closure)


def clipping(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return Clipping(params, 100.0)


def build(make: Callable[..., torch.optim.Optimizer], plan: str) -> None:
    models = [drawn(nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH))) for _ in range(2)]

    def built(world: Any) -> None:
        engine = plait.build(
            models[world.rank],
            f"{plan} precision:float64",
            loss=F.mse_loss,
            optimizer=make,
            world=world,
        )
        engine.step(batch(WIDTH))

    threaded(2, built, plan=plan)


@pytest.mark.parametrize(
    "plan", ["pp2:1f1b mb2", "dp2:server", "dp2:async-server,stale1", "dp2:zero1", "tp2"]
)
def test_a_norm_of_all_gradients_is_refused_where_ranks_have_some(plan: str) -> None:
    with pytest.raises(OptimizerError, match="by the gradients of others"):
        build(clipping, plan)


@pytest.mark.parametrize("plan", ["dp2:zero1", "pp2:1f1b mb2"])
def test_an_owner_of_whole_tensors_has_some_too(plan: str) -> None:
    with pytest.raises(OptimizerError, match="Clipping updates a parameter"):
        build(plait.WholeTensors(clipping), plan)


class OwnRate(torch.optim.SGD):
    """Finds its rate by the way that all parameters have gone, as D-Adaptation and Prodigy do.

    The first steps have the first rate, so that they are those of other optimizers.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self.rate = 1e-6

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = [one for one in self.param_groups[0]["params"] if one.grad is not None]
        along = moved = 0.0
        for param in own:
            past = self.state[param].setdefault("past", torch.zeros_like(param))
            along += self.rate * float((param.grad.sign() * past).sum())
            past.add_(param.grad.sign(), alpha=self.rate)
            moved += float(past.abs().sum())
            param.sub_(param.grad.sign(), alpha=self.rate)
        self.state[own[0]]["along"] = along = self.state[own[0]].get("along", 0.0) + along
        self.rate = max(self.rate, along / moved)


@pytest.mark.parametrize("plan", ["pp2:1f1b mb2", "dp2:server", "dp2:zero1", "tp2"])
def test_a_rate_that_grows_by_all_parameters_is_refused(plan: str) -> None:
    """It does so after some steps in one direction."""
    with pytest.raises(OptimizerError, match="OwnRate updates a parameter by the gradients"):
        build(OwnRate, plan)


def test_ranks_that_have_all_take_it() -> None:
    build(clipping, "dp2")
    build(clipping, "dp2:ring")


def sharing(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)

    class Sharing(Noisy):
        """Draws from a generator of its own."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.add_(torch.randn(param.shape, generator=generator))

    return Sharing(params)


OTHERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
    "asgd": torch.optim.ASGD,
    "noisy": Noisy,
    "sharing": sharing,
    "whole": plait.WholeTensors(torch.optim.Adafactor),
    "averaged": plait.AveragedWeights(torch.optim.AdamW, decay=0.9),
    "lbfgs": torch.optim.LBFGS,
}


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_of_single_parameters_pass(name: str) -> None:
    require_apart(OTHERS[name], "pp2", 5)
