"""Odd input where a slip would go unnoticed: an error of plait's own, with the cure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.cli import main
from plait.errors import ClusterError, ConfigError, PlanError
from plait.explain.explanation import explain
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.schedules import make
from plait.toml import read_toml
from tests.unit.cli.test_report import CONFIG, two_steps, write_run


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return dict(read_toml(path, ConfigError))


def test_a_plan_and_a_cluster_of_another_type(tables: dict[str, Any]) -> None:
    odd: Any = 3
    with pytest.raises(PlanError, match="not int 3"):
        plait.estimate(tables, plan=odd, cluster="h100x8")
    for ask in (plait.choose, plait.search):
        with pytest.raises(ClusterError, match="not 3"):
            ask(tables, cluster=odd)


@pytest.mark.parametrize("ask", [plait.choose, plait.search])
def test_a_list_of_no_plans(ask: Callable[..., object], tables: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="top = 0"):
        ask(tables, cluster="h100x8", top=0)


@pytest.mark.parametrize("words", [["interleaved,v0"], ["interleaved", "--virtual", "0"]])
def test_a_schedule_of_no_stages_on_a_rank(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", *words, "--json"]) == 2
    assert "take 2 or more" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("term", ["ep2 remat:full", "cp2:ring remat:full", "tp2 remat:selective"])
def test_recomputed_cases_are_explained(term: str) -> None:
    explanation = explain(term)
    plain = explain(term.partition(" ")[0])
    assert explanation.recordings[0].losses == plain.recordings[0].losses
    assert explanation.sent() == explanation.counted()
    assert explanation.routing == plain.routing


def test_a_run_whose_plan_is_gone_is_not_read_as_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, "pp2:1f1b mb4", two_steps(lower(make("1f1b", 2, 4)), 2))
    (run / "plan.txt").write_text("")
    assert main(["report", str(run)]) == 2
    assert "plan.txt is empty" in capsys.readouterr().err


def test_a_client_without_its_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    assert main(["federated", str(path), "--client", "1", "--json"]) == 2
    assert "leave it out to simulate all" in json.loads(capsys.readouterr().out)["error"]
