"""`--plan auto` and cluster `local` on a machine that nobody has measured: measured once, and
remembered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.cli import common, main
from plait.cluster import probe_path
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

    def measure_here(out: Path | None, num_ranks: int | None = None) -> dict[str, Any]:
        if out is not None:
            out.write_text(json.dumps(PROBE))
            written.append(out)
        return PROBE

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
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


def test_a_home_that_cannot_be_written_keeps_no_measurements(
    measurements: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    config = load({**CONFIG, "plan": {"text": "auto"}})
    assert common.plan_of(config, None).world_size == 2
    assert not measurements
    said = capsys.readouterr().err
    assert "probe.json cannot be written: Not a directory, so every command" in said
    assert main(["probe"]) == 2
    assert "; name another file by --out" in capsys.readouterr().err


def test_the_measurements_are_kept_where_xdg_says(
    measurements: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert common.plan_of(load(CONFIG), "auto").world_size == 2
    assert measurements == [tmp_path / "caches" / "plait" / "probe.json"]


def test_a_user_without_a_home_has_the_root_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert probe_path() == Path("/.cache/plait/probe.json")
