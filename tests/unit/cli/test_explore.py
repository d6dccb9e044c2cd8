"""`plait explore`: its data are the answers of the verbs, and its end is clean."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import pytest

from plait.cli import main
from plait.cli.explore import opening_of, site_of
from plait.errors import ClusterError, ConfigError

CONFIG = """
[model]
name = "gpt"
num_hidden_layers = 4
hidden_size = 64
num_attention_heads = 4
vocab_size = 256
[data]
name = "random"
seq_len = 64
[train]
global_batch = 16
[cluster]
name = "a100-80gbx4"
"""
PASTED = (
    '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,'
    ' "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 128}'
)
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    (tmp_path / "pasted.json").write_text(PASTED)
    (tmp_path / "cluster.toml").write_text('count = 4\n[device]\npreset = "h100"\n')
    return path


def answered(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    capsys.readouterr()
    main([*map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


def asked(config: Path | str, cluster: str | None, /, **choices: str) -> Any:
    site = site_of(opening_of(str(config), cluster))
    reply = site.answer(
        "/plan.json", {name: [value] for name, value in choices.items()}, lambda: False
    )
    assert reply is not None
    return json.loads(reply.text)


@pytest.mark.parametrize(
    ("words", "cluster", "choices"),
    [
        ([], None, {}),
        (["--cluster", "h100x8"], "h100x8", {}),
        (
            ["--cluster", "h100x8", "--top", "20", "--explain"],
            None,
            {"cluster": "h100x8", "top": "20", "explain": "1"},
        ),
        (
            ["--cluster", "v100-16gb", "--gpus", "2"],
            "h100x8",
            {"cluster": "v100-16gb", "devices": "2"},
        ),
        (
            ["--framework", "megatron-core", "--risk", "0.05"],
            None,
            {"framework": "megatron-core", "risk": "0.05"},
        ),
        (
            ["--set", "train.global_batch=32", "data.seq_len=128"],
            None,
            {"batch": "32", "sequence": "128"},
        ),
        (
            ["--objective", "memory", "--explain", "dp4"],
            None,
            {"objective": "memory", "explain": "dp4"},
        ),
    ],
)
def test_the_pages_data_are_the_answer_of_plan(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    cluster: str | None,
    choices: dict[str, str],
) -> None:
    assert asked(config, cluster, **choices) == answered(capsys, "plan", config, *words)


def test_a_pasted_model_a_cluster_file_and_what_fits_nowhere_too(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pasted = config.with_name("pasted.json")
    file = str(config.with_name("cluster.toml"))
    assert asked(config, file, model=PASTED) == answered(capsys, "plan", pasted, "--cluster", file)
    found = asked("mistral-7b", "t4x1", batch="1", devices="1", framework="fsdp")
    assert found["plans"] == [] and "times the memory" in found["reason"]


def test_what_is_wrong_is_said_in_words(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "cluster": ("h10x8", "unknown preset 'h10'"),
        "model": (HOSTILE, HOSTILE),
        "devices": ("many", "devices must be a whole number, not 'many'"),
        "framework": ("megatorn", "did you mean"),
        "top": ("0", "--top is 0"),
    }
    for name, (value, words) in said.items():
        assert words in asked(config, None, **{name: value})["error"]
    assert "'a: b xxx" in (long := asked(config, None, model="a:\nb " + "x" * 9999)["error"])
    assert len(long) < 500
    wrong = answered(capsys, "plan", config, "--cluster", "h10x8")
    assert asked(config, None, cluster="h10x8") == wrong


def test_the_other_data_are_answers_of_verbs(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = site_of(opening_of(str(config), None))

    def data(path: str, **choices: str) -> Any:
        reply = site.answer(path, {key: [value] for key, value in choices.items()}, lambda: False)
        assert reply is not None
        return json.loads(reply.text)

    plan = "pp2:1f1b dp2 mb4"
    assert data("/estimate.json", plan=plan) == answered(capsys, "estimate", config, "--plan", plan)
    assert data("/schedule.json", name="zb-h1", stages="3", microbatches="6") == answered(
        capsys, "schedule", "zb-h1", "--stages", "3", "--microbatches", "6"
    )
    assert data("/export.json", plan=plan, to="deepspeed") == answered(
        capsys, "export", "plan", plan, "--to", "deepspeed"
    )
    assert "no schedule" in data("/schedule.json", name=str(config))["error"]
    assert "too small" not in data("/export.json", plan=str(config), to="deepspeed").get("text", "")


def test_a_command_line_that_is_wrong_serves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3-8b'"):
        opening_of("llama3-8", None)
    with pytest.raises(ClusterError, match="unknown preset"):
        opening_of(None, "h10x8")


@pytest.mark.slow
@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_it_serves_until_it_is_stopped_and_loads_no_torch(
    config: Path, sign: int, code: int
) -> None:
    script = (
        "import sys\nfrom plait.cli import main\ncode = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    words = ["explore", str(config), *(["--json"] if sign == signal.SIGINT else [])]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        url = json.loads(line)["url"] if line.startswith("{") else line
        parts = urlsplit(url)
        assert parts.scheme == "http" and parts.hostname == "127.0.0.1"
        with urlopen(url, timeout=60) as reply:
            assert b"plait explore" in reply.read()
        data = f"http://{parts.netloc}/plan.json?{parts.query}&{urlencode({'top': 1})}"
        with urlopen(data, timeout=60) as reply:
            assert len(json.load(reply)["plans"]) == 1
        with pytest.raises(HTTPError, match="403"):
            urlopen(f"http://{parts.netloc}/plan.json?token=wrong", timeout=60)
        process.send_signal(sign)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code and "Traceback" not in errors, errors
