"""The drift of bf16 from float32: that of one device under every axis, as a distribution; and a
wrong scale stands out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from plait.comm import World
from plait.engine.update import Update
from plait.errors import PlanError
from plait.plan import Plan
from plait.verify.drift import ALLOWED, DriftReport, DriftTask, drift, in_world
from tests.parity import verify_problems

Run = Callable[..., list[Any]]
PLANS = ["dp2:zero3 mb2", "tp2:1d,sp", "pp2:zb-h1 mb2", "tp4:2d", "pp2 tp2 mb2", "cp2:ring"]


def task(plan: str) -> DriftTask:
    keys = {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "vocab_size": 32,
        "num_hidden_layers": 2,
    }
    problem = verify_problems.Problem(
        {"name": "gpt", **keys, "max_position_embeddings": 12},
        {"name": "random", "seq_len": 8},
        verify_problems.train(),
    )
    return DriftTask(problem, f"{plan} precision:bf16", 3)


@pytest.mark.parametrize("plan", PLANS)
def test_every_axis_drifts_as_one_device_does(ranks: Run, plan: str) -> None:
    report: DriftReport = ranks(Plan.parse(plan).world_size, in_world, task(plan), plan=plan)[0]
    assert report.ok, report.text()
    told = report.as_dict()
    assert {
        "ok",
        "loss_error",
        "grad_error",
        "param_error",
        "worst",
        "plan",
        "world_size",
        "steps",
        "drift",
        "paths_not_walked",
    } <= told.keys()
    for kind in ("loss", "grad", "param"):
        quantiles = told["drift"][kind]["plan"]
        assert list(quantiles) == ["p10", "median", "p90", "p99", "max"]
        assert sorted(quantiles.values()) == list(quantiles.values())
    assert 1e-4 < told["drift"]["grad"]["plan"]["median"] < 0.1  # it is bf16 that was measured
    assert told["drift"]["grad"]["plan"]["p99"] < 1.0  # softmax does not see the bias of keys
    assert any("k.bias" in note for note in report.notes)
    assert "one device in bf16" in report.text()
    if plan == "dp2:zero3 mb2":  # tensors this small take one way only
        assert told["paths_not_walked"]
        assert f"not walked: {told['paths_not_walked'][0]}" in report.text()


def wrong_scale(world: World, given: DriftTask) -> DriftReport:
    """The planted fault: the gradients of the plan, and of it alone, are a tenth too large."""
    kept = Update.change

    def change(self: Update, totals: Any, step: int, divisor: float) -> Any:
        return kept(
            self,
            totals,
            step,
            divisor / (1.0 if threading.current_thread() is not threading.main_thread() else 1.1),
        )

    Update.change = change  # type: ignore[method-assign]
    try:
        return in_world(world, given)
    finally:
        Update.change = kept  # type: ignore[method-assign]


def test_a_wrong_scale_stands_out(ranks: Run) -> None:
    """One device in bf16 runs in a thread beside the plan, so only the plan is touched."""
    report: DriftReport = ranks(2, wrong_scale, task("dp2"), plan="dp2")[0]
    assert not report.ok
    assert not report.kinds["grad"].ok
    assert f"more than {ALLOWED:g} times" in report.text()


def test_refused_where_updates_are_delayed() -> None:
    with pytest.raises(PlanError, match="1f1b"):
        drift(task("dp1").problem, Plan.parse("pp2:2bw mb2"), 2)
