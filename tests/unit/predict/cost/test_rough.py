"""The rough estimate follows the formulas of the estimate: without a pipeline they are equal."""

from __future__ import annotations

import pytest

from plait.cluster import Cluster
from plait.plan import Plan
from plait.predict.cost import rough
from plait.predict.cost.api import job_of
from plait.predict.cost.machines import machine_of
from plait.predict.cost.model.tables import config_tables
from plait.predict.cost.rough import rough_estimate
from plait.predict.cost.step import estimate_job
from tests.unit.predict.cost.test_processor import CONFIG, PROBE

PLANS = (
    "dp2:zero2 mb2",
    "dp2:zero3 mb2",
    "dp8:zero3 remat:full",
    "dp2:zero1,offload",
    "dp4:ring mb2",
    "tp2:1d,sp dp2:zero3",
    "cp2 dp2",
)
CLUSTERS = {
    "accelerator": Cluster.parse("h100x8"),
    "processor": Cluster.local(PROBE),
    "processor without a profile": Cluster.local({**PROBE, "num_devices": 8, "host": None}),
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("text", PLANS)
def test_a_plan_without_a_pipeline_is_guessed_as_it_is_estimated(
    text: str, cluster: Cluster
) -> None:
    plan = Plan.parse(text).check()
    job = job_of(config_tables(CONFIG), plan)
    machine = machine_of(cluster)
    guess = rough_estimate(job, plan, machine)
    exact = estimate_job(job, plan, machine)
    assert guess.step_seconds == pytest.approx(exact.step_seconds, rel=1e-12)
    assert guess.memory_bytes == pytest.approx(exact.memory.total, rel=1e-12)


def test_memory_alone_is_known_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.parse("pp2 dp2:zero1 mb4").check()
    job = job_of(config_tables(CONFIG), plan)
    machine = machine_of(CLUSTERS["accelerator"])
    expected = rough_estimate(job, plan, machine).memory_bytes
    monkeypatch.setattr(rough, "closed_seconds", None)
    assert rough.RoughPlan(job, plan, machine).memory_bytes == expected
