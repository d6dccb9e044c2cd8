"""An optimizer that computes the loss again in its step is refused before the first one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plait
from plait.errors import OptimizerError


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r"LBFGS.step\(closure\) computes the loss again"):
        plait.build(
            nn.Linear(2, 1), "mb2", loss=nn.functional.mse_loss, optimizer=torch.optim.LBFGS
        )


class Sharpness(torch.optim.SGD):
    """SAM, whose step has a closure that is None by default and must be given."""

    def first_step(self) -> None:
        raise NotImplementedError

    def second_step(self) -> None:
        raise NotImplementedError


def test_an_optimizer_of_two_backwards_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r"Sharpness.step\(closure\) computes the loss again"):
        plait.build(nn.Linear(2, 1), "mb2", loss=nn.functional.mse_loss, optimizer=Sharpness)
