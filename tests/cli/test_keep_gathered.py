"""`keep_gathered` as a user meets it: chosen or named, shown, run, proven and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomllib

from tests.cli.command import CONFIG, plait

PLAN = "dp2:zero3 mb2"
ROOMY = 'count = 2\n[device]\npreset = "rtx4090"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config, and a cluster on which everything fits."""
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "roomy.toml").write_text(ROOMY)
    return tmp_path


@pytest.mark.long
def test_a_run_keeps_what_the_planner_chose_and_sends_what_it_predicts(folder: Path) -> None:
    words = ("--set", "cluster.name=roomy.toml", 'plan.keep_gathered="auto"')
    known = plait("estimate", "run.toml", "--plan", PLAN, *words, "--json", cwd=folder).json()
    assert known["keep_gathered"] == [0, 1]
    done = plait("train", "run.toml", "--plan", PLAN, "--out", "out", *words, "--json", cwd=folder)
    assert done.code == 0, done.err
    assert "plait: keep_gathered on roomy.toml: blocks 0 to 1" in done.err
    result = done.json()
    assert result["keep_gathered"] == [0, 1]
    config = tomllib.loads((folder / "out" / "config.toml").read_text())
    assert config["plan"]["keep_gathered"] == [0, 1]
    assert result["traffic"]["dp"] == known["traffic"]["dp"]
    plain = plait("train", "run.toml", "--plan", PLAN, "--json", cwd=folder).json()
    assert plain["traffic"]["dp"] > result["traffic"]["dp"]
    assert plain["final_loss"] == result["final_loss"]
    evaluated = plait(
        "evaluate", "out", "--plan", "dp2:zero1", "--json", "--batches", "1", cwd=folder
    )
    assert evaluated.code == 0, evaluated.err


@pytest.mark.long
def test_named_blocks_are_proven_and_others_are_refused(folder: Path) -> None:
    words = ("verify", "run.toml", "--plan")
    done = plait(*words, PLAN, "--json", "--set", "plan.keep_gathered=[1]", cwd=folder)
    assert done.code == 0, done.err
    assert done.json()["ok"]
    done = plait(*words, "dp2:zero1", "--set", "plan.keep_gathered=1", cwd=folder)
    assert done.code == 2
    assert "take dp2:zero3, or leave keep_gathered out" in done.err
    done = plait(*words, PLAN, "--set", "plan.keep_gathered=true", cwd=folder)
    assert done.code == 2
    assert (
        "the number of the last blocks, a list of numbers of blocks from 0, or 'auto'" in done.err
    )


def test_a_search_says_what_auto_would_make_of_its_first_plan(folder: Path) -> None:
    done = plait(
        "plan", "run.toml", "--cluster", "roomy.toml", "--fix", "dp2:zero3", "--json", "--set",
        'plan.keep_gathered="auto"', cwd=folder,
    )  # fmt: skip
    assert done.code == 0, done.err
    found = done.json()
    assert any("[plan] keep_gathered = 2: it is pred" in note for note in found["notes"])
    # At such a size the gain is below what a search calls another plan, or it is the first one.
    assert found["plans"][0].get("keep_gathered", [0, 1]) == [0, 1]
