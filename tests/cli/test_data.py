"""Whole runs on strangers' files: the same samples under any plan, and one sentence where they are
bad.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli import main
from plait.config import Config

CONFIG = """
[model]
name = "llama"
num_hidden_layers = 2
hidden_size = 8
num_attention_heads = 2
vocab_size = 256
[data]
seq_len = 8
workers = 1
skip_bad = 1
cache = "CACHE"
from_step = [0, 3]
[[data.mixture]]
name = "files"
files = ["docs/*.jsonl"]
weight = [3, 1]
[[data.mixture]]
name = "files"
files = ["b.txt"]
weight = [1, 1]
[train]
steps = 5
global_batch = 4
lr = 0.1
[plan]
text = "dp1 precision:float64"
[eval]
batches = 2
data = { name = "files", files = ["b.txt"], samples = "documents", cache = "CACHE" }
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    rows = [json.dumps({"text": f"document {number} of some"}) for number in range(30)]
    (tmp_path / "docs" / "a.jsonl").write_text("\n".join([*rows, "{"]))
    (tmp_path / "b.txt").write_text("".join(f"{number} is a line\n" for number in range(9)))
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG.replace("CACHE", str(tmp_path / "kept")))
    return path


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_resumed_under_another_plan_and_reads_the_same_samples(
    config: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    assert main(["train", str(config), "--out", str(whole), "--json"]) == 0
    parted = tmp_path / "parted"
    words = ["train", str(config), "--out", str(parted), "--json"]
    assert main([*words, "--steps", "2", "--plan", "dp2:zero1 precision:float64"]) == 0
    more = ["--resume", "--plan", "pp2 mb2 precision:float64", "--set", "data.workers=0"]
    assert main([*words, *more]) == 0
    assert losses(parted) == pytest.approx(losses(whole), rel=1e-9)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["bad_rows"] == 1
    assert len(list((tmp_path / "kept").iterdir())) == 2
    written = Config.load(whole / "config.toml")  # with paths that hold anywhere
    assert written.data.mixture is not None
    assert written.data.mixture[1].files == (str(tmp_path / "b.txt"),)


def test_a_bad_row_ends_before_a_rank_starts(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(config), "--out", str(tmp_path / "run"), "--set", "data.skip_bad=0"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "a.jsonl, row 31: this is no JSON" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
