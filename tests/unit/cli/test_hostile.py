"""Input that nobody means, by the command line: one sentence each, before any work is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli import main
from tests.unit.cli.test_report import CONFIG, two_steps, write_run

SCHEDULE = "name mine\nmicro-batches 1\nplacement 0 1\n0: 0F0 0B0\n1: 1F0 1B0\n"
DEEP = "[" * 100_000


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["interleaved,v²"], "say interleaved,v2"),
        (["gpipe", "--stages", "100000"], "at most 400,000 are drawn"),
        (["1f1b", "--microbatches", "999999999"], "at most 400,000 are drawn"),
        (["interleaved", "--virtual", "1000000"], "at most 400,000 are drawn"),
        (["x" * 5000], "no schedule is called"),
        (["gpipe\0"], "null character"),
        (["dp2"], "'dp2' is a plan without stages, so it has no schedule"),
    ],
)
def test_schedules_that_cannot_be_drawn(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(["schedule", *words], capsys)


@pytest.mark.parametrize(
    ("plan", "name", "stages", "micro_batches"),
    [
        ("pp4:1f1b mb8", "1f1b", 4, 8),
        ("pp2:interleaved,v3 dp2 mb4", "interleaved,v3", 2, 4),
        ("pp4", "1f1b", 4, 4),
    ],
)
def test_a_plan_is_no_schedule_and_the_command_that_is_meant_is_named(
    plan: str, name: str, stages: int, micro_batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    meant = ["schedule", name, "--stages", str(stages), "--microbatches", str(micro_batches)]
    said = refused(["schedule", plan], capsys)
    assert said.strip().endswith(f"say its schedule alone: plait {' '.join(meant)}")
    assert main(meant) == 0


def test_compare_names_every_plan_that_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is a command less until the comparison runs."""
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    said = refused(["compare", str(config), "--plans", "dp1", "bogus", "dp2:zero9"], capsys)
    assert "2 of 3 plans cannot run" in said
    assert "'bogus'" in said and "zero9" in said
    assert "cannot run:" not in refused(["compare", str(config), "--plans", "dp1", "no"], capsys)
    said = refused(["compare", str(config), "--plans", "dp1; dp2:zero3"], capsys)
    assert "write --plans 'dp1' 'dp2:zero3'" in said


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("delay -1", "the least is delay 0"),
        ("steps 0", "the least is steps 1"),
        ("micro-batches 0", "the least is micro-batches 1"),
        ("steps 2", "do not divide them"),
        ("micro-batches 999999999", "need two actions for each pair, and 4 actions are listed"),
    ],
)
def test_numbers_of_a_schedule_file(
    lines: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedule.txt"
    path.write_text(f"{SCHEDULE}{lines}\n")
    assert message in refused(["schedule", str(path)], capsys)


def test_a_plan_whose_schedule_is_too_long_to_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.replace("global_batch = 8", "global_batch = 999999999"))
    message = refused(["train", str(config), "--plan", "dp1 mb999999999"], capsys)
    assert "at most 3,000,000 are listed" in message


@pytest.mark.parametrize("name", ["deep.toml", "deep.json", "digits.toml", "deep.cluster.toml"])
def test_files_of_absurd_depth_or_length(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text("x = " + "9" * 5000 if "digits" in name else f"x = {DEEP}")
    if name.endswith("json"):
        path.write_text(DEEP)
    sound = tmp_path / "sound.toml"
    sound.write_text(CONFIG)
    words = [str(path)] if "cluster" not in name else [str(sound), "--cluster", str(path)]
    message = refused(["estimate", *words, "--plan", "dp1"], capsys)
    assert path.name in message
    assert ("too deep" in message) == ("deep" in name)


def test_override_of_absurd_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound = tmp_path / "sound.toml"
    sound.write_text(CONFIG)
    for value in (DEEP, "9" * 5000):
        message = refused(["train", str(sound), "--set", f"train.steps={value}"], capsys)
        assert "train.steps" in message


def test_a_page_that_cannot_be_written_is_refused_before_any_plan_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.cli.train.launch", lambda *_, **__: pytest.fail("a plan ran"))
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    page = config / "folder" / "page.html"
    words = ["compare", str(config), "--plans", "dp1", "--html"]
    assert f"cannot write {page}" in refused([*words, str(page)], capsys)
    assert "it is a folder; name a place" in refused([*words, str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("summary.json", "traffic", [1], "traffic is [1]"),
        ("summary.json", "peak_memory", ["x"], "peak_memory.0 is 'x'"),
        ("summary.json", "final_loss", "x", "final_loss is 'x'"),
        ("metrics.jsonl", "seconds", None, "line 1: seconds is None"),
        ("metrics.jsonl", "step", "1", "line 1: step is '1'"),
        ("trace.json", "ts", "x", "ts is 'x'"),
        ("trace.json", "dur", -1.0, "dur is -1.0"),
        ("trace.json", "name", 3, "name is 3"),
        ("trace.json", "name", "F0", "is no action"),
        ("trace.json", "args", [], "args is []"),
    ],
)
def test_reports_of_damaged_runs(
    file: str,
    key: str,
    value: object,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from plait.parallel.pipeline.lower import lower
    from plait.parallel.pipeline.schedules import make

    run = write_run(tmp_path, "pp2:1f1b mb2", two_steps(lower(make("1f1b", 2, 2)), 2))
    path = run / file
    lines = path.read_text().splitlines()
    record = json.loads(lines[0])
    target = record
    if file == "trace.json":
        target = next(event for event in record["traceEvents"] if event["ph"] == "X")
    target[key] = value
    path.write_text("\n".join([json.dumps(record), *lines[1:]]))
    assert message in refused(["report", str(run)], capsys)
    path.write_text(f"{lines[0][:-3]}\n")
    assert "JSON" in refused(["report", str(run)], capsys)
    path.write_text("[]")
    assert file in refused(["report", str(run)], capsys)


def test_a_cluster_of_hundreds_of_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(f"count = {10**400}\n[device]\npreset = 'h100'\n")
    words = [str(tmp_path / "config.toml"), "--plan", "dp1", "--cluster", str(cluster)]
    assert "count is a number of hundreds of digits" in refused(["estimate", *words], capsys)


def test_a_pasted_config_whose_family_is_no_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**sizes, "model_type": ["llama"]}))
    words = ["estimate", str(path), "--plan", "dp1", "--cluster", "h100x1"]
    assert "model.model_type = ['llama'] must be a name" in refused(words, capsys)


def test_a_deployment_into_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    words = ["federated", str(config), "--deploy", str(config / "x")]
    assert "cannot make the folder" in refused(words, capsys)
