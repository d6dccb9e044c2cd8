"""Sweeps over devices, batch and length: each point is the answer of one search."""

import json

import pytest

import plait
from plait.cli import main
from plait.errors import ConfigError
from plait.predict.planner.sweep import MOST_POINTS, SweepAxes, sweep

CONFIG = {
    "model": {
        "name": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 32000,
    },
    "data": {"seq_len": 1024},
    "train": {"global_batch": 32},
}


def test_each_point_is_the_search_at_that_point():
    axes = SweepAxes.parse(["devices=4..8", "batch=16,64", "length=2048"])
    points = sweep(CONFIG, "h100", axes)
    assert [(one.num_devices, one.batch, one.length) for one in points] == [
        (4, 16, 2048),
        (4, 64, 2048),
        (8, 16, 2048),
        (8, 64, 2048),
    ]
    for one in points:
        asked = {
            **CONFIG,
            "data": {"seq_len": 2048},
            "train": {"global_batch": one.batch},
        }
        assert one.best == plait.choose(asked, f"h100x{one.num_devices}")[0]


def test_the_config_is_left_as_it_was():
    before = json.dumps(CONFIG)
    sweep(CONFIG, "h100", SweepAxes.parse(["batch=16", "length=512"]))
    assert json.dumps(CONFIG) == before


def test_a_point_at_which_nothing_fits_has_its_reason():
    model = {**CONFIG["model"], "hidden_size": 16384, "num_hidden_layers": 64}
    points = sweep({**CONFIG, "model": model}, "l40s", SweepAxes.parse(["devices=1"]))
    assert points[0].best is None and "times the memory of l40s" in points[0].reason


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["device=8"], "did you mean 'devices'"),
        (["devices"], "say each key once"),
        (["devices=8", "devices=16"], "say each key once"),
        (["devices=eight"], "'eight' is no whole number"),
        (["devices=64..8"], "'64..8' has no numbers"),
        (["batch=0"], "'0' has no numbers"),
        (["devices=1..512", "batch=1..512", "length=1..512"], f"ask for 1 to {MOST_POINTS}"),
    ],
)
def test_what_is_no_sweep_is_refused(words, message):
    with pytest.raises(ConfigError, match="--sweep") as caught:
        SweepAxes.parse(words)
    assert message in str(caught.value)


def answer(capsys, *words):
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_verb_gives_a_table_and_a_picture(capsys, path, tmp_path):
    picture = tmp_path / "sweep.svg"
    asked = ("plan", path, "--cluster", "h100", "--sweep", "devices=4,8", "length=512,1024")
    code, data = answer(capsys, *asked, "--svg", str(picture), "--tokens", "1e9")
    assert code == 0 and len(data["sweep"]) == 4
    assert {"plan", "days", "bars", "num_devices", "batch", "length"} <= set(data["sweep"][0])
    svg = picture.read_text()
    assert svg.count("<polyline") == 2 and svg.count("<circle") == 4
    assert "tokens a second of one device" in svg and "512 tokens a sample" in svg
    assert main([*asked, "--tokens", "1e9"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:4] == ["plan", "devices", "batch", "length"] and len(table) == 5


def test_no_point_that_fits_is_the_answer_no(capsys, path):
    large = ("--set", "model.hidden_size=32768", "model.num_hidden_layers=64")
    code, data = answer(
        capsys, "plan", path, "--cluster", "rtx4090", "--sweep", "devices=1,2", *large
    )
    assert code == 1 and all(row["plan"] is None and row["reason"] for row in data["sweep"])


def test_a_picture_without_a_sweep_is_refused(capsys, path):
    code, data = answer(capsys, "plan", path, "--cluster", "h100", "--svg", "x.svg")
    assert code == 2 and "--sweep" in data["error"]
