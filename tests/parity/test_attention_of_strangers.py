"""Attention that takes its sizes from its input is split by heads, and equals one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

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
