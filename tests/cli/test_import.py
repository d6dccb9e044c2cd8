"""`plait import` answers with a plan, a config and a word on every other key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli import main
from plait.config import Config

CONFIGS = Path(__file__).parent.parent / "unit" / "interop" / "configs"


def test_import_answers_plan_config_and_unmapped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(CONFIGS / "deepspeed.json"), "--from", "deepspeed", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan"] == "dp8:zero2,offload mb4 precision:bf16"
    assert answer["config"]["train"]["global_batch"] == 64
    assert all(item["key"] and item["reason"] for item in answer["unmapped"])


def test_the_written_config_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "mine.toml"
    assert main(["import", str(CONFIGS / "nanotron.yaml"), "--out", str(out)]) == 0
    assert "# ignored: " in capsys.readouterr().out
    assert Config.load(out).plan.text == "pp2 tp2:1d,sp dp2:zero1 mb4 precision:bf16"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere.json"], "there is no such file"),
        (["deepspeed.json", "--from", "deepspede"], "did you mean 'deepspeed'"),
        (["deepspeed.json", "--gpus", "0"], "one rank or more"),
    ],
)
def test_bad_input_exits_2(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CONFIGS / words[0]
    assert main(["import", str(path), *words[1:]]) == 2
    assert error in capsys.readouterr().err


def test_what_is_no_checkpoint_is_not_called_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(tmp_path)]) == 2
    assert "name the folder that has them" in capsys.readouterr().err
    garbage = tmp_path / "garbage.pt"
    garbage.write_bytes(b"no weights")
    assert main(["import", str(garbage), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "it is damaged, or no file of torch.save; copy it again" in said
    assert "weights_only" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_size": -8}', "train.global_batch = -8 is wrong: it must be 1 or more"),
        ('{"seed": -3, "train_batch_size": 8}', "train.seed = -3 is wrong"),
    ],
)
def test_a_value_that_no_config_may_have_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    out = tmp_path / "out.toml"
    assert main(["import", str(path), "--from", "deepspeed", "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
