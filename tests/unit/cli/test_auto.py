"""`--plan auto` and cluster `local` on a machine that nobody has measured: measured once, and
remembered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.cli import common, main
from plait.config import load
from plait.predict.probe import saved
from tests.unit.predict.cost import test_processor

PROBE = test_processor.PROBE
CONFIG = {**test_processor.CONFIG, "data": {"name": "random", "seq_len": 128}}


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A home without measurements, and a probe that writes what it is told; returns the files it
    has written.
    """
    written: list[Path] = []

    def measure_here(out: Path, num_ranks: int | None = None) -> dict[str, Any]:
        out.write_text(json.dumps(PROBE))
        written.append(out)
        return PROBE

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(saved, "measure_here", measure_here)
    return written


def test_auto_measures_the_machine_once(measurements: list[Path]) -> None:
    config = load({**CONFIG, "plan": {"text": "auto"}})
    assert common.plan_of(config, None).world_size == 2
    assert common.plan_of(config, "auto").world_size == 2
    assert len(measurements) == 1 and measurements[0].is_file()


def test_auto_for_more_ranks_than_cores(measurements: list[Path]) -> None:
    assert common.plan_of(load(CONFIG), "auto", 4).world_size == 4


def test_a_named_plan_or_cluster_measures_nothing(measurements: list[Path]) -> None:
    assert common.plan_of(load(CONFIG), "dp2").world_size == 2
    assert common.plan_of(load({**CONFIG, "cluster": {"name": "h100x4"}}), "auto").world_size == 4
    assert not measurements


def test_plan_and_estimate_measure_as_well(
    measurements: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[model]\nname='gpt'\nnum_hidden_layers=4\nhidden_size=128\nnum_attention_heads=8\nvocab_size=256\n"
        "[data]\nseq_len=128\n[train]\nglobal_batch=16\n"
    )
    assert main(["estimate", str(file), "--plan", "dp8", "--cluster", "local", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] > 0
    assert main(["plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]
    assert len(measurements) == 1
