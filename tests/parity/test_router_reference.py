"""One device has noisy routers, and experts that choose, of its own: right ones are equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.models.routing import Router
from plait.verify.reference.plain.layers import PlainRouter
from tests.helpers.pool import Pool
from tests.parity.planted.entry import Entry, judged, report_of
from tests.parity.planted.table import BY_NAME
from tests.parity.verify_problems import problem

KEYS: tuple[dict[str, Any], ...] = (
    {"topk_method": "noisy", "router_aux_loss_coef": 0.1},
    {"topk_method": "expert_choice", "router_z_loss_coef": 0.02},
)


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: keys["topk_method"])
def test_a_right_router_is_equal_to_one_devices_own(rank_pool: Pool, keys: dict[str, Any]) -> None:
    entry = Entry("", "dp2 mb2", "", "", list, model="experts", model_keys=keys)
    report = report_of(entry, rank_pool.run)
    assert report.ok, report.text()
    model = replace(problem("experts"), model=entry.problem.model)
    routers = [one for one in model.make_whole_model(torch.float64).modules() if _routes(one)]
    assert routers and all(type(one) is PlainRouter for one in routers)


@pytest.mark.parametrize("name", ["widths of noise are linear", "experts take the worst tokens"])
def test_a_wrong_router_is_named(rank_pool: Pool, name: str) -> None:
    found = judged(BY_NAME[name], rank_pool.run)
    assert not found.wrong, f"{found.wrong}\n{found.report.text()}"


def _routes(module: Any) -> bool:
    return isinstance(module, Router)
