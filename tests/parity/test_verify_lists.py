"""`verify` on batches that hold lists of one entry for each sample: tensors, texts, targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.config import load
from plait.plan import Plan
from plait.verify import Report
from plait.verify.run import VerifyTask, in_world, problem_of

HERE = "tests.parity.lists_of_samples"
Run = Callable[..., list[Any]]


def run_task(world: Any, task: VerifyTask) -> Report:
    return in_world(world, task)


def report_of(
    ranks: Run, plan: str, model: str, data: str, *probes: str, shares: list[int] | None = None
) -> Report:
    config: dict[str, Any] = {
        "model": {"python": f"{HERE}:{model}"},
        "data": {"python": f"{HERE}:{data}"},
        "train": {"loss": f"{HERE}:loss", "global_batch": 8, "lr": 0.01, "seed": 3},
        "plan": {} if shares is None else {"shares": shares},
    }
    task = VerifyTask(problem_of(load(config)), f"{plan} precision:float64", 2, None, probes)
    size = Plan.parse(plan).world_size
    report: Report = ranks(size, run_task, task, plan=plan)[0]
    return report


KINDS = [("bags", "bag_data"), ("texts", "text_data"), ("texts", "text_and_list_data")]


@pytest.mark.parametrize(("model", "data"), KINDS)
@pytest.mark.parametrize(
    ("plan", "shares"), [("dp2", None), ("dp2 mb2", [3, 1]), ("mb2", None), ("pp2:1f1b mb2", None)]
)
def test_lists_of_samples_pass(
    ranks: Run, plan: str, shares: list[int] | None, model: str, data: str
) -> None:
    report = report_of(ranks, plan, model, data, "sgd", "last-batch", shares=shares)
    assert report.ok, report.text()
    assert {part.title for part in report.parts} == {"sgd", "last-batch"}


@pytest.mark.parametrize("plan", ["dp2", "dp2 mb2"])
def test_slices_of_lists_pass(ranks: Run, plan: str) -> None:
    """One device runs the slices one by one, since a batch norm is in them."""
    report = report_of(ranks, plan, "normed_bags", "bag_data", "sgd")
    assert report.ok, report.text()
    assert "batch-norm" in report.parts[0].notes[0]


@pytest.mark.parametrize(("model", "data"), KINDS)
def test_an_asynchronous_pipeline_of_lists_passes(ranks: Run, model: str, data: str) -> None:
    """One device runs a micro-batch of all data ranks at once."""
    report = report_of(ranks, "dp2 pp2:pipedream mb2", model, data, "sgd", shares=[3, 1])
    assert report.ok, report.text()
