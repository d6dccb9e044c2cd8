"""`plait evaluate` and `[eval]`: one answer under every plan, the best weights, an early end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from plait.cli import main
from plait.config import Config
from plait.errors import ConfigError
from plait.run.assemble import make_eval_batches, make_model, model_keys

CONFIG = """
[model]
name = "mlp"
in_features = 8
hidden_size = 8
num_hidden_layers = 2
out_features = 4
[data]
name = "random"
num_samples = 40
[train]
steps = 4
global_batch = 8
lr = 0.05
[plan]
text = "dp2:zero1 precision:float64"
[eval]
every = 2
keep_best = true
data = { name = "random", num_samples = 21, seed = 5 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "tiny.toml").write_text(CONFIG)
    words = ["train", str(folder / "tiny.toml"), "--out", str(folder / "run"), "--json"]
    assert main(words) == 0
    return folder


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["evaluate", *words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_the_run_has_a_line_for_each_evaluation(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "run" / "eval.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4]
    assert all(row["samples"] == 21 and row["perplexity"] is None for row in rows)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["eval"]["loss"] == rows[-1]["loss"]


@pytest.mark.long
def test_every_plan_gives_the_answer_of_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (folder / "run" / "eval.jsonl").read_text().splitlines()]
    for plan in ("dp1", "pp2", "tp2"):
        run = str(folder / "run")
        data = answer(capsys, run, "--plan", f"{plan} precision:float64")
        assert abs(data["loss"] - rows[-1]["loss"]) <= 1e-10 * rows[-1]["loss"]
        assert data["accuracy"] == rows[-1]["accuracy"]
        assert data["step"] == 4
    best = answer(capsys, str(folder / "run"), "--best")
    assert abs(best["loss"] - min(row["loss"] for row in rows)) <= 1e-12


def test_a_config_means_its_initial_weights(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = folder / "tiny.toml"
    data = answer(capsys, str(config), "--plan", "dp1 precision:float64", "--batches", "1")
    assert (data["samples"], data["step"], data["checkpoint"]) == (8, 0, None)


def test_perplexity_is_that_of_plain_pytorch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
[model]
python = "tiny_model:make"
[data]
python = "tiny_model:data"
[train]
global_batch = 4
[plan]
text = "dp2 precision:float64"
"""
    module = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))

def data():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (7, 5), generator=generator)
    return [(row, row.roll(1)) for row in tokens]
"""
    (tmp_path / "tiny_model.py").write_text(module)
    (tmp_path / "tiny.toml").write_text(text)
    config = Config.load(tmp_path / "tiny.toml")
    model = make_model(model_keys(config), config.train.seed).double()
    total = 0.0
    count = 0
    for inputs, targets in make_eval_batches(config):
        with torch.no_grad():
            logits = model(inputs).flatten(0, 1)
        total += float(F.cross_entropy(logits, targets.flatten(), reduction="sum"))
        count += targets.numel()
    data = answer(capsys, str(tmp_path / "tiny.toml"))
    assert abs(data["loss"] - total / count) <= 1e-10 * data["loss"]
    assert data["perplexity"] == pytest.approx(math.exp(data["loss"]), rel=1e-12)
    assert data["samples"] == 7


def test_evaluating_changes_no_step(folder: Path, tmp_path: Path) -> None:
    """Also where it reads the data of training: its stream is its own."""
    courses = []
    for every in (0, 1):
        out = tmp_path / f"every-{every}"
        words = ["train", str(folder / "tiny.toml"), "--out", str(out), "--plan", "dp1", "--json"]
        more = [f"eval.every={every}", f"eval.keep_best={str(every > 0).lower()}", "eval.batches=2"]
        data = 'eval.data={ name = "random", num_samples = 40 }'
        assert main([*words, "--set", *more, data]) == 0
        lines = (out / "metrics.jsonl").read_text().splitlines()
        courses.append([(row["loss"], row["grad_norm"]) for row in map(json.loads, lines)])
        assert (out / "eval.jsonl").exists() == (every > 0)
    assert courses[0] == courses[1]


def test_patience_ends_a_run_that_gets_no_better(folder: Path) -> None:
    words = ["train", str(folder / "tiny.toml"), "--out", str(folder / "early"), "--json"]
    more = ["--set", "eval.patience=2", "eval.every=1", "train.lr=1e-300", "train.steps=50"]
    assert main([*words, "--plan", "dp1", *more]) == 0
    summary = json.loads((folder / "early" / "summary.json").read_text())
    assert summary["steps"] == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("eval.every=-1", "eval.every = -1 is wrong"),
        ("eval.patience=0", "eval.patience = 0 is wrong"),
        ("eval.evry=1", "did you mean 'every'"),
        ('eval.data={name="randm"}', "eval.data.name = 'randm' is wrong"),
        ('log.to=["tensorbord"]', "log.to = "),
        ("log.to=3", "a list of tensorboard, wandb, mlflow"),
    ],
)
def test_bad_values_are_refused(folder: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.load(folder / "tiny.toml", [override])


def test_a_run_without_best_weights_says_the_key(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(folder / "tiny.toml"), "--best"]) == 2
    assert "--best belongs to a run's folder" in capsys.readouterr().err
    assert main(["evaluate", str(folder / "nowhere")]) == 2
