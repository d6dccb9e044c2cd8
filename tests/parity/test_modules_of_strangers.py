"""Strangers' modules pass `verify` on ranks that are threads, or are refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from plait.config import load
from plait.errors import ModelError, NotAvailable
from plait.plan import Plan
from plait.verify import Report
from plait.verify.run import VerifyTask, in_world, problem_of
from tests.helpers.threaded import threaded
from tests.parity import modules_of_strangers as others

PRODUCT = "pp2:1f1b tp2 dp2:zero1 mb2"
QUICK = [
    (others.Mixer, "pp2:1f1b tp2 mb2"),
    (others.Short, "cp2:ring"),
    (others.Shared, "cp2:ulysses"),
    (others.Turning, "cp2:ring"),
    (others.Contrast, "tp2"),
    (others.Encoder, "cp2:ring"),
    (others.Flattened, "tp4:2d"),
    (others.Weighed, "dp2:zero3"),
    (others.Turning, "pp2:1f1b tp2 mb2"),
    (others.Scaled, "dp2:zero3 pp2:1f1b mb2"),
    (others.Scaled, "dp2:zero3 pp2:zbv mb4"),
    (others.Normed, "dp2"),
    (others.Normed, "pp2:1f1b mb1"),
    (others.Named, "cp2:ring"),
    (others.Named, "tp4:2d"),
    (others.Packed, "pp2:1f1b mb2"),
    (others.Packed, "dp2:zero3 pp2:1f1b mb2"),
]
LONG = [
    *[(kind, PRODUCT) for kind in (others.Mixer, others.Experts, others.Short, others.Several)],
    *[(others.Mixer, plan) for plan in ("dp2:zero3", "tp2:1d,sp", "tp4:2d")],
    *[(others.Experts, plan) for plan in ("dp2:zero3", "tp2", "tp4:2d", "cp2:ring")],
    *[(others.Short, plan) for plan in ("tp2", "tp4:2d", "cp2:ulysses")],
    *[(others.Shared, plan) for plan in ("dp2:zero3", "pp2:1f1b mb2", "tp2", "cp2:ring")],
    *[(others.Scaled, f"dp2:zero3 pp2:{name} mb2") for name in ("gpipe", "zb-h1", "v-half")],
    *[(others.Several, plan) for plan in ("dp2:zero3", "pp2:1f1b mb2", "tp2", "tp4:2d")],
]


@pytest.fixture(autouse=True)
def one_generator(monkeypatch: Any) -> Iterator[None]:
    """Pipelines take the generator as untouched: threads share it, and nothing is drawn."""
    state = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_rng_state", lambda: state)
        yield


def report_of(kind: type[nn.Module], plan_text: str) -> Report:
    plan = Plan.parse(f"{plan_text} precision:float64")
    task = VerifyTask(problem_of(load(others.config(kind))), str(plan), 2, None, ("sgd",))
    reports: list[Report] = threaded(plan.world_size, in_world, task, plan=str(plan))
    return reports[0]


@pytest.mark.parametrize(("kind", "plan"), QUICK)
def test_equals_one_device(kind: type[nn.Module], plan: str) -> None:
    report = report_of(kind, plan)
    assert report.ok, report.text()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "plan"), LONG)
def test_each_kind_under_each_plan(kind: type[nn.Module], plan: str) -> None:
    report = report_of(kind, plan)
    assert report.ok, report.text()


def test_outputs_of_parts_and_of_wholes_are_refused_together() -> None:
    with pytest.raises(ModelError, match="the forward of Several mixes the positions"):
        report_of(others.Several, "cp2:ring")


def test_a_grid_refuses_to_compare_samples_of_other_ranks() -> None:
    with pytest.raises(NotAvailable, match=r"`return means @ means\.T`, compares samples"):
        report_of(others.Contrast, "tp4:2d")
