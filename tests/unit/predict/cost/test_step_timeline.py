"""The timeline of a predicted step is as long as the prediction."""

from __future__ import annotations

import json

import pytest

from plait.cli import main
from plait.cluster import Cluster
from plait.errors import ConfigError, PlanError
from plait.plan import Plan
from plait.predict.cost.api import job_of
from plait.predict.cost.machines import machine_of
from plait.predict.cost.model import tables
from plait.predict.cost.model.known import KNOWN
from plait.predict.cost.step import estimate_job
from plait.predict.cost.step_timeline import check_drawable, step_timeline
from tests.architecture.source import ROOT

GPT2 = KNOWN["gpt2"].tables


def test_a_timeline_is_as_long_as_the_predicted_step() -> None:
    plan = Plan.parse("pp2:1f1b dp2:zero1 mb4").check()
    machine = machine_of(Cluster.parse("h100x4"))
    job = job_of(GPT2, plan)
    step = step_timeline(job, plan, machine)
    assert step.ranks == (0, 1)
    expected = estimate_job(job, plan, machine).step_seconds
    assert step.seconds == pytest.approx(expected, rel=0.05)


def test_a_step_of_too_many_actions_is_refused() -> None:
    with pytest.raises(PlanError, match=r"196,608 actions, and at most 20,000"):
        check_drawable(Plan.parse("pp64 mb1024"))


def test_the_verb_lists_the_spans(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "examples" / "first_light.toml")
    words = ["estimate", config, "--plan", "pp2 mb4", "--cluster", "h100x2"]
    assert main([*words, "--json"]) == 0
    assert "timeline" not in json.loads(capsys.readouterr().out)
    assert main([*words, "--timeline", "--json"]) == 0
    spans = json.loads(capsys.readouterr().out)["timeline"]
    assert {one["kind"] for one in spans} == {"F", "B", "U"}
    assert len([one for one in spans if one["kind"] == "F"]) == 8
    assert main([*words, "--timeline"]) == 0
    assert "rank 1 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"train": {"global_batch": "x"}}, "train.global_batch must be a whole number"),
        ({"model": {"name": "gpt"}}, "paste a Hugging Face config.json"),
        ({"model": {}}, "model_type is missing"),
        ({"sound": {}}, "unknown section"),
        ({"data": 3}, "must be a table"),
    ],
)
def test_tables_are_checked_where_there_are_no_schemas(
    given: dict[str, object], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    tables.check_tables(GPT2)
    with pytest.raises(ConfigError, match=fault):
        tables.check_tables({**GPT2, **given})
