"""Layers that need a whole batch, or one read of a weight: computed weights, and counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import plait
from plait.engine.whole_batch import refuse_whole_batch
from plait.errors import ModelError
from plait.plan import Plan
from tests.helpers.threaded import threaded


class Counting(nn.Module):
    """A weight that counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.count += 1
        return weight * 2


def _counts(world: plait.World) -> list[int]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    counting = Counting()
    parametrize.register_parametrization(model[0], "weight", counting)
    engine = plait.build(
        model,
        "dp1",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    counts = []
    for _ in range(2):
        before = counting.count
        engine.step((torch.ones(4, 8), torch.zeros(4, 2)))
        counts.append(counting.count - before)
    return counts


def test_a_computed_weight_is_computed_once_a_forward() -> None:
    assert threaded(1, _counts) == [[1, 1]]


@pytest.mark.parametrize(
    ("options", "plan", "name"),
    [
        ({"max_norm": 1.0}, "dp2", "max_norm"),
        ({"max_norm": 1.0}, "cp2:ring", "max_norm"),
        ({"scale_grad_by_freq": True}, "dp2:zero3", "scale_grad_by_freq"),
        ({"scale_grad_by_freq": True}, "pp2:1f1b mb2", "scale_grad_by_freq"),
        ({"max_norm": 1.0}, "tp4:2d", "max_norm"),
        ({"scale_grad_by_freq": True}, "tp8:2.5d,depth2", "scale_grad_by_freq"),
    ],
)
def test_an_option_over_the_whole_batch_is_refused(
    options: dict[str, float], plan: str, name: str
) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, **options), nn.Linear(4, 2))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=f"'0' has {name}.* leave {name}"):
        refuse_whole_batch(model, Plan.parse(plan))


@pytest.mark.parametrize("plan", ["dp1", "tp2"])
def test_the_whole_batch_on_one_rank_may_have_them(plan: str) -> None:
    model = nn.Embedding(8, 4, max_norm=1.0, scale_grad_by_freq=True)
    refuse_whole_batch(model, Plan.parse(plan))
