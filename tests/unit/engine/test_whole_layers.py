"""A tensor axis that divides no layer of a model is told, since it saves nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.comm import World


class Fused(nn.Module):
    """Attention [B, S, 8] of a fused projection whose number of heads is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        queries, keys, values = self.fused(hidden).view(batch, length, 3, 2, 4).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", queries, keys).softmax(-1)
        mixed = torch.einsum("bhij,bjhd->bihd", scores, values)
        return self.out(mixed.reshape(batch, length, 8))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def said(world: World, make: Any) -> list[str]:
    model = make()
    example = torch.ones(2, 3, 8)
    options = plait.Options(cutting=plait.Cutting(example=(example,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = plait.build(
            model,
            "tp2",
            loss=nn.functional.mse_loss,
            optimizer=torch.optim.SGD,
            options=options,
            world=world,
        )
        engine.step((example, example))
    return [str(one.message) for one in caught if "divides no layer" in str(one.message)]


@pytest.mark.parametrize(("make", "count"), [(Fused, 1), (mlp, 0)])
def test_an_axis_that_divides_nothing_is_told_once(ranks: Any, make: Any, count: int) -> None:
    first, second = ranks(2, said, make, plan="tp2")
    assert (len(first), len(second)) == (count, 0)
    assert all(text.startswith("tp2 divides no layer of a Fused: each of its 2") for text in first)
