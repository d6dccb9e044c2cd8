"""`plait launch` writes scripts that fit the plan, and a script that two agents can run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli import main

CONFIG = """
[model]
name = "mlp"
in_features = 8
hidden_size = 8
num_hidden_layers = 2
out_features = 4
[data]
name = "random"
[train]
steps = 3
global_batch = 8
[plan]
text = "dp2:zero1"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return path


def test_the_answer_has_the_script(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", str(config), "--for", "slurm", "--nodes", "2", "--gpus", "1", "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["for"] == "slurm"
    assert answer["world_size"] == 2
    assert "#SBATCH --nodes=2" in answer["text"]
    assert answer["submit"].startswith("sbatch ")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--for", "slurm", "--nodes", "3", "--gpus", "2"], "needs 2 ranks; 3 nodes with 2 GPUs"),
        (["--for", "slurm", "--nodes", "0"], "--nodes is 0"),
        (["--for", "pbs"], "no script for 'pbs'"),
        (["--for", "slrm", "--nodes", "3"], "did you mean 'slurm'"),
        (["--for", "slurm", "--plan", "auto"], "--gpus M"),
        ([], "--for"),
    ],
)
def test_bad_input_exits_2(
    words: list[str], error: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", str(config), *words]) == 2
    assert error in capsys.readouterr().err


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.long
def test_two_agents_of_torchrun_run_the_script(config: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    folder = tmp_path / "run"
    words = ["launch", str(config), "--for", "torchrun", "--nodes", "2", "--cpu"]
    assert main([*words, "--out", str(script), "--run-folder", str(folder)]) == 0
    environment = {**os.environ, "HEAD": "127.0.0.1", "PORT": str(free_port())}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["OMP_NUM_THREADS"] = "1"
    agents = [
        subprocess.Popen(
            ["bash", str(script)],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3


def test_letters_that_stdout_cannot_show_are_escapes(tmp_path: Path) -> None:
    """As on a machine whose locale is an old one."""
    (tmp_path / "tiny.toml").write_text(CONFIG)
    words = ["launch", "tiny.toml", "--for", "slurm", "--run-folder", "l\u00e4ufe"]
    done = subprocess.run(
        [sys.executable, "-m", "plait", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "l\\xe4ufe" in done.stdout
