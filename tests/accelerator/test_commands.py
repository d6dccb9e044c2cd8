"""Commands with ranks as processes that share one GPU: losses of one device, saved and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.accelerator.on_device import is_there
from tests.cli.command import plait
from tests.parity.harness import TOLERANCE

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not is_there(), reason="there is no GPU at hand"),
]
CONFIG = """
[model]
name = "llama"
num_hidden_layers = 4
hidden_size = 64
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 96
vocab_size = 256
max_position_embeddings = 64
[data]
name = "stdlib"
seq_len = 32
[train]
steps = 6
global_batch = 8
optimizer = "adamw"
lr = 1e-3
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "config.toml"
    path.write_text(CONFIG)
    return path


def losses(config: Path, plan: str, out: Path, *words: str) -> list[float]:
    """The losses of all steps in the run's folder."""
    text = f"{plan} precision:float64"
    done = plait("train", config, "--plan", text, "--out", out, "--json", *words, cwd=config.parent)
    assert done.code == 0, done.err[-2000:]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def alone(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(config, "dp1", tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize("plan", ["dp2:zero1 tp2", "pp2:1f1b dp2:zero3 mb2", "cp2:ring"])
def test_processes_that_share_a_gpu_have_the_losses_of_one(
    config: Path, alone: list[float], tmp_path: Path, plan: str
) -> None:
    found = losses(config, plan, tmp_path / "run", "--set", "recovery.snapshot_every=2")
    assert found == pytest.approx(alone, rel=TOLERANCE)


def test_a_run_goes_on_under_another_plan(config: Path, alone: list[float], tmp_path: Path) -> None:
    out = tmp_path / "run"
    losses(config, "dp2:zero3", out, "--steps", "3")
    assert losses(config, "tp2", out, "--resume", "auto") == pytest.approx(alone, rel=TOLERANCE)


def test_a_compiled_run_in_bf16_learns(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    plan = "dp1 precision:bf16 compile"
    done = plait("train", config, "--plan", plan, "--out", out, "--json", cwd=config.parent)
    assert done.code == 0, done.err[-2000:]
    summary = done.json()
    assert summary["final_loss"] < summary["first_loss"]


def test_a_proof_says_that_it_is_of_processors(config: Path) -> None:
    done = plait("verify", config, "--plan", "dp2:zero2", "--json", cwd=config.parent)
    assert done.code == 0, done.err[-2000:]
    report = done.json()
    assert report["ok"]
    assert any("compared on processors" in note for note in report["notes"])
