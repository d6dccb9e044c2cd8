"""`plait calibrate`: factors from measured steps, in the cluster file, in every prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import plait
from plait.cli import main
from plait.cluster import Cluster
from plait.cluster.calibration import Calibration
from plait.errors import ClusterError, ConfigError, PlanError
from plait.predict.cost.calibrate import (
    WIDEST,
    MeasuredStep,
    calibrate,
    doubts,
    inverse_of,
    widened,
)
from tests.unit.predict.cost.shapes import LLAMA_8B, config

ASKED = config(LLAMA_8B, seq_len=4096, global_batch=64)
PLANS = (
    "dp16:zero3 mb4 precision:bf16 remat:full",
    "tp8:1d,sp dp2:zero1 mb16 precision:bf16",
    "pp4 tp4:1d,sp mb16 precision:bf16",
    "dp16:zero1 mb4 precision:bf16 remat:full",
)
TRUTH = Calibration(compute=1.12, communication=1.3)


def measured(plan: str, truth: Calibration = TRUTH) -> MeasuredStep:
    cluster = replace(Cluster.parse("h100x16"), calibration=truth)
    return MeasuredStep(ASKED, plan, plait.estimate(ASKED, plan, cluster).step_seconds)


@pytest.mark.parametrize("held_out", PLANS)
def test_a_plan_that_was_not_measured_is_predicted_better(held_out: str) -> None:
    found = calibrate([measured(plan) for plan in PLANS if plan != held_out], "h100x16")
    truth = measured(held_out).seconds
    plain = plait.estimate(ASKED, held_out, "h100x16").step_seconds
    own = replace(Cluster.parse("h100x16"), calibration=found)
    fitted = plait.estimate(ASKED, held_out, own)
    assert abs(fitted.step_seconds / truth - 1) < abs(plain / truth - 1) / 3
    assert found.runs == 3 and 0 < found.compute_sd < 0.12
    assert found.time_bar < 1


def test_bars_of_a_calibrated_cluster_are_narrower_and_hold_the_number() -> None:
    narrow = replace(Cluster.parse("h100x16"), calibration=Calibration(time_bar=0.5))
    plain = plait.estimate(ASKED, PLANS[0], "h100x16")
    own = plait.estimate(ASKED, PLANS[0], narrow)
    low, high = own.bars()["step_seconds"]
    wide_low, wide_high = plain.bars()["step_seconds"]
    assert wide_low <= low <= own.step_seconds <= high < wide_high


def test_one_step_says_less_than_three_and_none_is_refused() -> None:
    one = calibrate([measured(PLANS[0])], "h100x16")
    three = calibrate([measured(plan) for plan in PLANS[:3]], "h100x16")
    assert three.compute_sd < one.compute_sd and three.communication_sd < one.communication_sd
    with pytest.raises(ConfigError, match="no step was measured"):
        calibrate([], "h100x16")
    with pytest.raises(ConfigError, match=r"^a measured step took 0 s; seconds are"):
        calibrate([MeasuredStep(ASKED, PLANS[0], 0.0)], "h100x16")
    with pytest.raises(PlanError):
        calibrate([MeasuredStep(ASKED, "dp65", 1.0)], "h100x16")


@pytest.mark.parametrize("times", [0.5, 2.0, 4.0])
def test_bars_hold_the_steps_that_contradict_the_model(times: float) -> None:
    steps = [measured(plan, Calibration()) for plan in PLANS]
    steps = [replace(one, seconds=times * one.seconds) for one in steps]
    for some in (steps[:1], steps):
        found = calibrate(some, "h100x16")
        own = replace(Cluster.parse("h100x16"), calibration=found)
        for step in some:
            low, high = plait.estimate(step.config, step.plan, own).bars()["step_seconds"]
            assert low * (1 - 1e-9) <= step.seconds <= high * (1 + 1e-9)
            assert times == 4 or doubts(found, some, Cluster.parse("h100x16")) == []


def test_bars_of_steps_that_fit_stay_as_narrow_as_the_factors_are_known() -> None:
    found = calibrate([measured(plan) for plan in PLANS], "h100x16")
    assert found.time_bar == pytest.approx(0.72, abs=0.01)
    assert widened(found, [(0.0, "several nodes")]) == found
    assert widened(found, [(-9.0, "one node")]).time_bar == WIDEST


def test_a_wrong_unit_is_warned_of(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    out = tmp_path / "own.toml"
    plain = plait.estimate(str(path), "dp8:zero1 mb2", "h100x8").step_seconds
    words = ["calibrate", "--step", str(path), "dp8:zero1 mb2", str(1000 * plain)]
    words += ["--cluster", "h100x8", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["time_bar"] == WIDEST
    first, second = data["warnings"]
    assert first.startswith("compute is at its bound, 7.39") and first.endswith("seconds?")
    assert second.startswith("dp8:zero1 mb2 took") and "is h100x8 the cluster?" in second
    assert main(words) == 0
    assert "warning: compute is at its bound" in capsys.readouterr().out
    words[4] = str(1.1 * plain)
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


def test_the_inverse_of_a_matrix() -> None:
    matrix = [[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]]
    found = inverse_of(matrix)
    for i in range(3):
        for j in range(3):
            product = sum(matrix[i][k] * found[k][j] for k in range(3))
            assert product == pytest.approx(float(i == j), abs=1e-12)


TOML = """
[model]
name = "llama"
num_hidden_layers = 8
hidden_size = 1024
num_attention_heads = 8
vocab_size = 32000
[data]
seq_len = 1024
[train]
global_batch = 32
"""


def test_the_file_is_a_cluster_for_every_verb(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    out = tmp_path / "own.toml"
    plain = plait.estimate(str(path), "dp8:zero1 mb2", "h100x8").step_seconds
    words = ["--step", str(path), "dp8:zero1 mb2", str(1.3 * plain), "--out", str(out)]
    assert main(["calibrate", *words, "--cluster", "h100x8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (step,) = data["steps"]
    assert step["error_before"] == pytest.approx(1 / 1.3 - 1)
    assert abs(step["error_after"]) < 0.5 * abs(step["error_before"]) and data["compute_sd"] > 0
    cluster = Cluster.parse(str(out))
    assert cluster.num_devices == 8 and cluster.calibration is not None
    assert cluster.calibration.compute == pytest.approx(data["compute"])
    fitted = plait.estimate(str(path), "dp8:zero1 mb2", str(out)).step_seconds
    assert fitted / (1.3 * plain) - 1 == pytest.approx(step["error_after"], abs=1e-6)
    assert main(["plan", str(path), "--cluster", str(out), "--json"]) == 0
    named = {**json.loads(json.dumps(plait_tables(path))), "cluster": {"name": str(out)}}
    assert plait.estimate(named, "dp8:zero1 mb2").step_seconds == fitted
    again = tmp_path / "again.toml"
    assert main(["calibrate", *words[:-1], str(again), "--cluster", str(out)]) == 0
    assert "of the predicted seconds" in capsys.readouterr().out


def plait_tables(path: Path) -> dict[str, object]:
    from plait.predict.cost.model.tables import config_tables

    return dict(config_tables(str(path)))


def test_a_run_s_folder_is_a_measured_step(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(TOML)
    (folder / "plan.txt").write_text("dp8:zero1 mb2\n")
    (folder / "summary.json").write_text('{"step_seconds_median": 0.2}')
    out = tmp_path / "own.toml"
    words = ["calibrate", str(folder), "--cluster", "h100x8", "--out", str(out), "--json"]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["steps"][0]["seconds"] == 0.2 and data["runs"] == 1
    (folder / "summary.json").unlink()
    assert main(words) == 2
    assert "no run has ended" in json.loads(capsys.readouterr().out)["error"]
    assert main(["calibrate", "--cluster", "h100x8", "--out", str(out), "--json"]) == 2
    assert "needs a RUN_DIR" in json.loads(capsys.readouterr().out)["error"]


def test_keys_of_a_calibration_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[device]\npreset = 'h100'\n[calibration]\ncompute = 900\n")
    with pytest.raises(ClusterError, match=r"calibration\.compute is 900"):
        Cluster.parse(str(path))
    path.write_text("[device]\npreset = 'h100'\n[calibration]\ncompuet = 1\n")
    with pytest.raises(ClusterError, match=r"did you mean 'calibration\.compute'"):
        Cluster.parse(str(path))


def test_a_known_model_is_a_config_of_a_step(tmp_path: Path, capsys) -> None:
    out = tmp_path / "mine.toml"
    words = ["--step", "llama3-8b", "dp8:zero2 mb4 precision:bf16", "4.2", "--out", str(out)]
    assert main(["calibrate", *words, "--cluster", "h100x8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["seconds"] == 4.2
    words[1] = "llama3-9b"
    assert main(["calibrate", *words, "--cluster", "h100x8"]) == 2
    assert "neither a file nor a known model" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "word"), [(1e9, "less"), (1e-9, "more")])
def test_seconds_that_no_factors_explain_are_refused(seconds: float, word: str) -> None:
    step = MeasuredStep(config(LLAMA_8B), "dp8:zero3 precision:bf16", seconds)
    with pytest.raises(ConfigError, match=f"are predicted for h100x8, .* times {word}; name the"):
        calibrate([step], "h100x8")
