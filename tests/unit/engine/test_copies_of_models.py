"""A copy or a pickle of a model whose modules talk to other ranks is refused by a sentence."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.comm import World
from plait.errors import ModelError


def refusals(world: World, plan: str) -> list[str]:
    """The sentences to a copy and to a pickle of a model that was trained."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    engine = plait.build(
        model,
        plan,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD,
        world=world,
    )
    engine.step((torch.ones(4, 4), torch.tensor([0, 1, 2, 1])))
    said = []
    for attempt in (copy.deepcopy, lambda one: torch.save(one, io.BytesIO())):
        try:
            attempt(model)
        except ModelError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(("size", "plan"), [(1, "dp1:zero3"), (2, "dp2:zero3"), (2, "tp2")])
def test_a_copy_of_parts_is_refused_with_the_cure(ranks: Any, size: int, plan: str) -> None:
    for said in ranks(size, refusals, plan, plan=plan):
        assert len(said) == 2
        for text in said:
            assert "engine.save_pretrained(path)" in text
