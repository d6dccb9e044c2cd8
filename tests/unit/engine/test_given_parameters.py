"""An optimizer of other parameters than a rank's own would train nothing, and is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.errors import OptimizerError
from plait.models.parameters import Parameters

Make = Callable[[Parameters], torch.optim.Optimizer]


def built(model: nn.Module, plan: str, optimizer: Make) -> plait.Engine:
    return plait.build(model, plan, loss=F.cross_entropy, optimizer=optimizer)


@pytest.mark.parametrize("plan", ["dp1", "dp1:zero1", "mb2"])
def test_a_function_that_takes_the_model_instead_is_refused(plan: str) -> None:
    model = nn.Linear(3, 5)
    with pytest.raises(OptimizerError) as refused:
        built(model, plan, lambda params: torch.optim.SGD(model.parameters()))
    assert "over 2 of 2 parameters that it was not given, such as one of shape [5, 3]" in str(
        refused.value
    )
    assert "params.named()" in str(refused.value)


def test_one_stranger_among_the_given_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(OptimizerError, match="over 1 of 3 parameters"):
        built(nn.Linear(3, 5), "dp1", lambda params: torch.optim.SGD([*params, weight]))


def test_groups_by_name_train_both() -> None:
    def groups(params: Parameters) -> torch.optim.Optimizer:
        named = params.named()
        return torch.optim.SGD(
            [
                {"params": [one for name, one in named if name == "bias"], "lr": 0.5},
                {"params": [one for name, one in named if name != "bias"]},
            ],
            lr=0.1,
        )

    model = nn.Linear(3, 5)
    engine = built(model, "mb2", groups)
    before = [param.detach().clone() for param in model.parameters()]
    engine.step((torch.ones(4, 3), torch.tensor([0, 1, 2, 1])))
    engine.world.close()
    assert all((a != b).any() for a, b in zip(before, model.parameters(), strict=True))
