"""What is no loss function, or returns no loss, is refused by one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.errors import ModelError


def built(loss: Any) -> Any:
    return plait.build(torch.nn.Linear(3, 1), "dp1", loss=loss, optimizer=torch.optim.SGD)


def test_no_function_is_refused_before_a_step() -> None:
    with pytest.raises(
        ModelError, match=r"not NoneType None.*lambda output, targets: output\.loss"
    ):
        built(None)


def test_a_loss_that_returns_a_mapping_is_told_its_names() -> None:
    engine = built(lambda output, targets: {"main": output.mean(), "extra": output.sum()})
    with pytest.raises(ModelError, match="a mapping of main, extra"):
        engine.step((torch.ones(2, 3), torch.ones(2, 1)))
    engine.world.close()
