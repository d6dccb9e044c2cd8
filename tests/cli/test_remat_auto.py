"""`remat:auto` as a user meets it: the choice is shown, run, proven and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomllib

import plait as library
from plait.cluster import Cluster
from plait.toml import read_toml
from tests.cli.command import CONFIG, plait

PLAN = "pp2:1f1b mb2 remat:auto"
TALL = CONFIG.replace("num_hidden_layers = 2", "num_hidden_layers = 4").replace(
    "seq_len = 8", "seq_len = 64"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, and clusters whose devices hold half of what may be recomputed, or nearly none."""
    here = tmp_path_factory.mktemp("remat")
    (here / "tall.toml").write_text(TALL)
    write_cluster(here, "large", 24.0)
    tables = read_toml(here / "tall.toml", ValueError)
    none, full = (
        library.estimate(tables, PLAN.replace("auto", word), str(here / "large.toml"))
        for word in ("none", "full")
    )
    size = Cluster.parse(str(here / "large.toml")).device.memory_bytes
    outside = size - none.memory_limit
    half = outside + (none.memory.total + full.memory.total) / 2
    write_cluster(here, "half", 24.0 * half / size)
    write_cluster(here, "small", 24.0 * (outside + full.memory.total / 2) / size)
    return here


def write_cluster(folder: Path, name: str, memory_gb: float) -> None:
    text = f'count = 2\n[device]\npreset = "rtx4090"\nmemory_gb = {memory_gb!r}\n'
    (folder / f"{name}.toml").write_text(text)


def test_the_estimate_shows_the_choice(folder: Path) -> None:
    words = ("estimate", "tall.toml", "--plan", PLAN, "--cluster")
    found = {
        name: plait(*words, f"{name}.toml", "--json", cwd=folder)
        for name in ("large", "half", "small")
    }
    assert [one.code for one in found.values()] == [0, 0, 1]
    remat = {name: one.json()["remat"] for name, one in found.items()}
    assert remat["large"] == ["none"] * 4
    assert 0 < remat["half"].count("none") < 4
    assert remat["small"] == ["full"] * 4
    notes = found["small"].json()["notes"]
    assert any("no choice of remat:auto fits" in note for note in notes)
    shown = plait(*words, "half.toml", cwd=folder).out
    assert "\nremat      blocks 0" in shown


def test_a_run_takes_the_choice_and_keeps_it(folder: Path) -> None:
    cluster = ("--set", "cluster.name=half.toml")
    done = plait(
        "train", "tall.toml", "--plan", PLAN, "--out", "run", *cluster, "--json", cwd=folder
    )
    assert done.code == 0, done.err
    known = plait(
        "estimate", "tall.toml", "--plan", PLAN, "--cluster", "half.toml", "--json", cwd=folder
    ).json()
    result = done.json()
    assert result["plan"] == "pp2 remat:auto"
    assert result["remat"] == known["remat"]
    assert "plait: remat:auto on half.toml: blocks 0" in done.err
    summary: Any = json.loads((folder / "run" / "summary.json").read_text())
    config = tomllib.loads((folder / "run" / "config.toml").read_text())
    assert summary["remat"] == config["plan"]["remat"] == known["remat"]
    plain = plait("train", "tall.toml", "--plan", "pp2 mb2", "--json", cwd=folder).json()
    assert "remat" not in plain
    assert result["final_loss"] == pytest.approx(plain["final_loss"], rel=1e-6)
    evaluated = plait("evaluate", "run", "--json", "--batches", "1", cwd=folder)
    assert evaluated.code == 0, evaluated.err


def test_the_choice_is_proven(folder: Path) -> None:
    words = ("verify", "tall.toml", "--plan", PLAN, "--set", "cluster.name=half.toml", "--json")
    done = plait(*words, cwd=folder)
    assert done.code == 0, done.err
    assert done.json()["ok"]


def test_a_run_that_cannot_fit_is_refused(folder: Path) -> None:
    words = ("train", "tall.toml", "--plan", PLAN, "--set", "cluster.name=small.toml")
    done = plait(*words, cwd=folder)
    assert done.code == 2
    assert "does not fit on small.toml, whatever its blocks keep" in done.err


def test_other_words_are_refused(folder: Path) -> None:
    words = ("train", "tall.toml", "--plan", PLAN, "--set", "cluster.name=large.toml")
    done = plait(*words, 'plan.remat=["full","none"]', cwd=folder)
    assert done.code == 2
    assert "2 words and the model" in done.err
    done = plait(*words, 'plan.remat=["some"]', cwd=folder)
    assert done.code == 2
    assert "plan.remat" in done.err


def test_exports_and_searches_name_the_cure(folder: Path) -> None:
    done = plait("export", "plan", PLAN, "--to", "torchtitan", cwd=folder)
    assert done.code == 2
    assert "export remat:full or remat:selective" in done.err
    done = plait("plan", "tall.toml", "--cluster", "h100x8", "--fix", "remat:auto", cwd=folder)
    assert done.code == 2
    assert "fix 'remat:auto'" in done.err
