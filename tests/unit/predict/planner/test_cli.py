"""`plait plan` and `plait estimate` as a user calls them."""

import json

import pytest

from plait.cli import main
from plait.plan import Plan

CONFIG = """
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


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    return str(file)


def answer(capsys, *words):
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_plan_prints_plans_best_first(capsys, path):
    code, data = answer(capsys, "plan", path, "--cluster", "h100x8", "--top", "3", "--explain")
    assert code == 0 and len(data["plans"]) == 3
    assert data["plans"][0]["step_seconds"] <= data["plans"][1]["step_seconds"]
    assert data["explanation"] and data["pareto"]


def test_plan_says_which_plans_are_too_near_and_what_stands_in_for_bf16(capsys, path):
    _, data = answer(capsys, "plan", path, "--cluster", "v100-32gbx8")
    near, held = data["notes"][1], data["notes"][0]
    assert "too near to tell apart" in near and "has no bf16" in held
    _, data = answer(capsys, "plan", path, "--cluster", "h100x8", "--objective", "memory")
    assert not any("tell apart" in note for note in data["notes"])


def test_images_are_counted_as_samples(capsys, tmp_path):
    file = tmp_path / "images.toml"
    file.write_text('[model]\nname = "resnet"\n[train]\nglobal_batch = 64\n')
    assert main(["plan", str(file), "--cluster", "h100x2"]) == 0
    shown = capsys.readouterr().out
    assert "samples/s" in shown and "USD/M samples" in shown and "tokens" not in shown


def test_plan_for_another_number_of_devices(capsys, path):
    _, data = answer(capsys, "plan", path, "--cluster", "h100", "--gpus", "4")
    assert data["num_devices"] == 4


def test_plan_says_no_with_exit_code_1(capsys, path):
    sizes = (
        "--set",
        "model.hidden_size=32768",
        "--set",
        "model.num_hidden_layers=64",
        "--set",
        "model.num_attention_heads=64",
    )
    code, data = answer(capsys, "plan", path, "--cluster", "rtx4090x2", *sizes)
    assert code == 1 and data["plans"] == [] and "fits from" in data["reason"]


def test_estimate_and_its_exit_codes(capsys, path):
    code, data = answer(capsys, "estimate", path, "--plan", "dp8:zero1 mb2", "--cluster", "h100x8")
    assert code == 0 and data["plan"] == "dp8:zero1 mb2"
    code, data = answer(capsys, "estimate", path, "--plan", "dp8", "--cluster", "h100x4")
    assert code == 2 and "needs 8 devices" in data["error"]


def test_both_print_for_people(capsys, path):
    assert main(["plan", path, "--cluster", "h100x8"]) == 0
    assert main(["estimate", path, "--plan", "dp8", "--cluster", "h100x8"]) == 0
    out = capsys.readouterr().out
    assert "MFU" in out and "predicted" in out


def test_questions_of_a_whole_run(capsys, path):
    asked = ("--cluster", "h100x8", "--tokens", "1e12", "--mtbf", "40000")
    _, data = answer(capsys, "plan", path, *asked, "--fix", "dp8", "--top", "2")
    assert all(one["days"] > 0 and one["goodput"]["useful_fraction"] < 1 for one in data["plans"])
    assert all(one["plan"].split()[0].startswith("dp8") for one in data["plans"])
    _, data = answer(capsys, "estimate", path, "--plan", "dp8:zero1 mb2", *asked)
    assert {"days", "price", "energy_kwh", "goodput"} <= set(data)
    assert main(["estimate", path, "--plan", "dp8:zero1 mb2", *asked]) == 0
    out = capsys.readouterr().out
    assert "kWh" in out and "checkpoints every" in out
    code, data = answer(capsys, "plan", path, "--cluster", "h100x8", "--tokens", "-1")
    assert code == 2 and "15e12" in data["error"]


def test_the_costs_of_failures_are_those_of_a_run(capsys, path, tmp_path):
    one = {"count": 10, "seconds": 0.5}
    (tmp_path / "summary.json").write_text(json.dumps({"snapshots": one, "recoveries": []}))
    asked = ("--cluster", "h100x8", "--mtbf", "40000", "--costs", str(tmp_path))
    _, data = answer(capsys, "plan", path, *asked, "--top", "2")
    assert all(one["goodput"]["snapshots"]["seconds"] == 0.05 for one in data["plans"])
    estimate = ("estimate", path, "--plan", "dp8:zero1 mb2", *asked)
    _, data = answer(capsys, *estimate)
    assert data["goodput"]["measured"] == ["snapshot"]
    assert main([*estimate]) == 0
    assert "measured: snapshot" in capsys.readouterr().out
    code, data = answer(capsys, "plan", path, *asked[:2], "--costs", str(tmp_path))
    assert code == 2 and "--mtbf HOURS" in data["error"]
    code, data = answer(capsys, "plan", path, *asked, "--tokens", "1e9", "--sweep", "devices=8..16")
    assert code == 2 and "--costs" in data["error"]
    (tmp_path / "summary.json").write_text("[]")
    code, data = answer(capsys, *estimate)
    assert code == 2 and "is no summary of a run" in data["error"]


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_eight_bits_train_where_a_device_has_them(capsys, path, verb, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plan = "dp1 precision:fp8"
    option = ["--plans", plan] if verb == "compare" else ["--plan", plan]
    code, data = answer(capsys, verb, path, *option, "--set", "data.name=random")
    assert code == 2 and data["error"].endswith("To train, take precision:bf16")


@pytest.mark.parametrize("verb", ["train", "compare", "verify"])
def test_verbs_that_run_refuse_scales_of_blocks_in_one_sentence(capsys, path, verb):
    plan = "dp1 precision:mxfp8"
    option = ["--plans", plan] if verb == "compare" else ["--plan", plan]
    code, data = answer(capsys, verb, path, *option, "--set", "data.name=random")
    assert code == 2 and data["error"].endswith("not be run; take precision:bf16")


def test_plans_of_a_list_are_no_near_twins(capsys, path):
    _, data = answer(capsys, "plan", path, "--cluster", "h100x16", "--top", "5")
    seen = {}
    for one in data["plans"]:
        plan = Plan.parse(one["plan"])
        degrees = (plan.tp.size, plan.pp.size, plan.cp.size, plan.dp.size)
        for other in seen.get(degrees, []):
            assert abs(one["step_seconds"] / other - 1) >= 0.01
        seen.setdefault(degrees, []).append(one["step_seconds"])
    assert len(data["plans"]) == 5
