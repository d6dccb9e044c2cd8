"""Adapters on a model without a table of its own are cut with their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from plait.config import load
from plait.models.adapter_parts import AdapterSettings
from plait.models.adapters import adapt
from plait.models.derived.table import derive
from plait.plan import Plan
from plait.verify import Report
from plait.verify.run import VerifyTask, in_world, problem_of
from tests.parity import attention_of_strangers as strangers

Run = Callable[..., list[Any]]
LORA: dict[str, Any] = {"kind": "lora", "rank": 4, "dropout": 0.2}
DORA: dict[str, Any] = {"kind": "dora", "rank": 4}


def run_task(world: Any, task: VerifyTask) -> Report:
    return in_world(world, task)


@pytest.mark.parametrize(
    ("kind", "adapter", "plan"),
    [
        (strangers.OfCausal, LORA, "tp2"),
        (strangers.OfPatches, LORA, "tp4:2d"),
        (strangers.OfTorchs, {**LORA, "dropout": 0.0}, "pp2 tp2 mb2"),
        (strangers.OfCausal, DORA, "tp2:1d,sp"),
    ],
)
def test_equals_one_device(
    ranks: Run, kind: type[nn.Module], adapter: dict[str, Any], plan: str
) -> None:
    problem = problem_of(load({**strangers.config(kind), "adapter": adapter}))
    task = VerifyTask(problem, f"{plan} precision:float64", 2, None, ("sgd",))
    report = ranks(Plan.parse(plan).world_size, run_task, task, plan=plan)[0]
    assert report.ok, report.text()


@pytest.mark.parametrize("adapter", [LORA, DORA])
@pytest.mark.parametrize("kind", [strangers.OfCausal, strangers.OfTorchs])
def test_layers_have_the_roles_that_they_have_without(
    kind: type[nn.Module], adapter: dict[str, Any]
) -> None:
    ids = torch.zeros(2, strangers.LENGTH, dtype=torch.long)
    plain, model = kind(), adapt(kind(), AdapterSettings(**adapter))
    names = [name for name, _ in model.named_modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    roles = derive(model, lambda: model(ids), 2).roles
    assert roles == derive(plain, lambda: plain(ids), 2).roles
    assert "row" in roles.values()
    assert [name for name, _ in model.named_modules()] == names
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
