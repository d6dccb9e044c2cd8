"""What a forward drops between split layers is dropped by one device's masks."""

from __future__ import annotations

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
from tests.parity import dropout_of_families as families
from tests.parity import dropout_of_strangers as strangers

Run = Callable[..., list[Any]]
KINDS = {
    strangers.OfDropped: {"attn.dropout": "share dropout/4:1"},
    strangers.OfFunctional: {"attn": "share view/4:2 view/3:2 dropout/4:1"},
    strangers.OfFused: {"attn": "share view/4:2 view/3:2 dropout/4:1"},
    strangers.OfGrouped: {"attn": "share n_head n_keys view/3:2 bias:0 dropout/4:1"},
    strangers.OfPadded: {"attn": "share view/4:2 view/3:2 dropout/4:1"},
    strangers.OfWidened: {"attn": "share view/4:2 view/3:2 dropout/4:1"},
    strangers.OfLayers: {"attn": "share dropout/3:2"},
    strangers.OfKept: {},
}
GRID = (strangers.OfDropped, strangers.OfKept)
CASES = [
    *[(kind, "tp2") for kind in KINDS],
    *[(kind, "tp4:2d") for kind in GRID],
    *[(strangers.OfFused, plan) for plan in ("pp2:1f1b tp2 mb2", "tp2 dp2:zero3")],
    *[(strangers.OfFunctional, plan) for plan in ("tp4", "tp2:1d,sp", "tp2 remat:full")],
    (strangers.Straight, "pp2 tp2 mb2"),
    *[(kind, "tp2") for kind in (strangers.OfInPlace, strangers.OfAgain, strangers.OfTwoWays)],
    (strangers.OfBeside, "tp2"),
    *[
        (kind, "tp2")
        for kind in (
            strangers.OfLearned,
            strangers.OfInfinite,
            strangers.OfBiased,
            strangers.OfCalled,
            strangers.OfHalfway,
        )
    ],
    *[(strangers.RowsFirst, plan) for plan in ("pp2 tp2 mb2", "tp2 remat:full")],
    *[(strangers.Halves, plan) for plan in ("tp2", "tp2 remat:full", "tp2 remat:selective")],
]


LONG = [
    *[(family, "tp2") for family in ("opt", "biogpt", "llama")],
    *[("opt", plan) for plan in ("tp2:1d,sp", "pp2 tp2 mb2")],
    ("gpt2", "tp4:2d"),
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
    ("family", "plan"),
    [
        *[(family, "tp2") for family in ("gpt2", "bert")],
        ("opt", "tp4:2d"),
        *[pytest.param(*case, marks=pytest.mark.long) for case in LONG],
    ],
)
def test_a_family_with_dropout_equals_one_device(ranks: Run, family: str, plan: str) -> None:
    problem = problem_of(load(families.config_of_family(family)))
    task = VerifyTask(problem, f"{plan} precision:float64", 2, None, ("sgd",))
    report = ranks(Plan.parse(plan).world_size, run_task, task, plan=plan)[0]
    assert report.ok, report.text()


@pytest.mark.parametrize("kind", KINDS)
def test_layers_around_dropout_are_split(kind: type[nn.Module]) -> None:
    model = kind()
    ids = torch.zeros(2, strangers.LENGTH, dtype=torch.long)
    roles = derive(model, lambda: model(ids), 2).roles
    for name, role in KINDS[kind].items():
        assert roles[f"blocks.*.{name}"] == role
    assert "row" in {role for name, role in roles.items() if ".attn." in name}


@pytest.mark.parametrize("kind", [strangers.OfInPlace, strangers.OfAgain, strangers.OfTwoWays])
def test_dropout_that_no_word_fits_leaves_attention_whole(kind: type[nn.Module]) -> None:
    model = kind()
    ids = torch.zeros(2, strangers.LENGTH, dtype=torch.long)
    roles = derive(model, lambda: model(ids), 2).roles
    assert roles["blocks.*.attn.proj"] == "replicated"
