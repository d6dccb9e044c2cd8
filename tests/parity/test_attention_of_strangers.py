"""Attention that takes its sizes from its input is split by heads, and equals one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.comm import World
from plait.config import load
from plait.models.derived.table import derive
from plait.plan import Plan
from plait.verify import Report
from plait.verify.run import VerifyTask, in_world, problem_of
from tests.parity import attention_of_strangers as strangers

Run = Callable[..., list[Any]]
KINDS = (strangers.OfCausal, strangers.OfMasked, strangers.OfPatches)
CASES = [
    *[(kind, "tp2") for kind in KINDS],
    *[(strangers.OfCausal, plan) for plan in ("tp4:2d", "pp2:1f1b tp2 mb2", "tp2 dp2:zero3")],
    *[(strangers.OfPatches, plan) for plan in ("tp4", "tp2:1d,sp", "tp2 remat:full")],
    *[
        (strangers.OfTorchs, plan)
        for plan in ("tp2", "tp4:2d", "pp2:1f1b tp2 mb2", "tp2 dp2:zero3")
    ],
    *[(strangers.Encoded, plan) for plan in ("tp2", "tp4", "tp2 mb2")],
    *[(strangers.Varied, plan) for plan in ("tp2", "tp4")],
    *[(strangers.LearnedMasks, plan) for plan in ("tp2", "tp4:2d")],
    (strangers.OfModes, "tp2"),
    (strangers.OfAgain, "tp2"),
]


def run_task(world: Any, task: VerifyTask) -> Report:
    return in_world(world, task)


@pytest.mark.parametrize(("kind", "plan"), CASES)
def test_equals_one_device(ranks: Run, kind: type[nn.Module], plan: str) -> None:
    problem = problem_of(load(strangers.config(kind)))
    task = VerifyTask(problem, f"{plan} precision:float64", 2, None, ("sgd",))
    report = ranks(Plan.parse(plan).world_size, run_task, task, plan=plan)[0]
    assert report.ok, report.text()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (strangers.OfCausal, "share n_embd view/4:2 view/3:2"),
        (strangers.OfMasked, "share view/4:2 view/3:2"),
        (strangers.OfPatches, "share view/5:3 view/3:2"),
    ],
)
def test_heads_are_split(kind: type[nn.Module], words: str) -> None:
    model = kind()
    ids = torch.zeros(2, strangers.LENGTH, dtype=torch.long)
    roles = derive(model, lambda: model(ids), 2).roles
    assert roles["blocks.*.attn"] == words
    assert "row" in {role for name, role in roles.items() if ".attn." in name}


@pytest.mark.parametrize("kind", [strangers.OfTorchs, strangers.Encoded, strangers.Varied])
def test_torchs_attention_is_split_by_heads(kind: type[nn.Module]) -> None:
    model = kind()
    ids = torch.zeros(2, strangers.LENGTH, dtype=torch.long)
    roles = derive(model, lambda: model(ids), 2).roles
    names = {name for name, one in model.named_modules() if isinstance(one, nn.MultiheadAttention)}
    heads = {re.sub(r"\.\d+\.", ".*.", name) for name in names}
    assert {name for name, role in roles.items() if role == "heads"} == heads
    assert {roles[f"{name}.out_proj"] for name in heads} == {"row"}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (strangers.OfModes, "otherwise in training than in evaluation"),
        (strangers.OfAgain, "the size of one"),
    ],
)
def test_views_that_no_word_fits_leave_attention_whole(kind: type[nn.Module], why: str) -> None:
    model = kind()
    table = derive(model, lambda: model(torch.zeros(2, strangers.LENGTH, dtype=torch.long)), 2)
    assert table.roles["blocks.*.attn.proj"] == "replicated"
    assert any("attn.proj" in note and why in note for note in table.notes), table.notes


class Refusing(nn.Module):
    """Torch's attention alone, under a table written by hand."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(12, **{"num_heads": 2, **settings})


def build_by_hand(world: World, settings: dict[str, Any], roles: dict[str, str]) -> None:
    model = Refusing(**settings)
    options = plait.Options(roles=roles)
    plait.build(
        model,
        "tp2",
        loss=lambda o, t: o.mean(),
        optimizer=torch.optim.SGD,
        options=options,
        world=world,
    )


@pytest.mark.parametrize(
    ("settings", "roles", "message"),
    [
        ({"num_heads": 3}, {"attn": "heads"}, "2 ranks must divide its heads"),
        ({"add_bias_kv": True}, {"attn": "heads"}, "without add_bias_kv"),
        ({"add_zero_attn": True}, {"attn": "heads"}, "without add_bias_kv and add_zero_attn"),
        ({}, {"attn": "share view/4"}, "'view/4' is no word of views"),
    ],
)
def test_a_table_by_hand_that_does_not_fit_is_refused(
    ranks: Run, settings: dict[str, Any], roles: dict[str, str], message: str
) -> None:
    table = {"": "whole", **roles, "attn.out_proj": "row"}
    with pytest.raises(Exception, match=message):
        ranks(2, build_by_hand, settings, table, plan="tp2")
