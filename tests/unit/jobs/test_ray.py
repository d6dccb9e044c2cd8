"""The script for Ray, run by Ray itself on a local instance with two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from plait.cli import main
from tests.architecture.source import ROOT
from tests.cli.test_launch_script import CONFIG, free_port

LIMIT_SECONDS = 300  # against hanging, not a measurement


def written(tmp_path: Path, *, steps: int) -> tuple[Path, Path, dict[str, str]]:
    """The script for one machine, the folder of its run, and the environment to start it in."""
    config = tmp_path / "tiny.toml"
    config.write_text(CONFIG.replace("steps = 3", f"steps = {steps}\ncheckpoint_every = 1"))
    script = tmp_path / "job.py"
    folder = tmp_path / "run"
    words = ["launch", str(config), "--for", "ray", "--nodes", "1", "--cpu"]
    assert main([*words, "--out", str(script), "--run-folder", str(folder)]) == 0
    text = script.read_text()
    script.write_text(text.replace("PORT = 29500", f"PORT = {free_port()}"))
    environment = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.update(PYTHONPATH=str(ROOT / "src"), RAY_USAGE_STATS_ENABLED="0")
    return script, folder, environment


def started(script: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
def test_ray_runs_the_script(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    script, folder, environment = written(tmp_path, steps=3)
    process = started(script, environment)
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, output
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3


@pytest.mark.long
def test_a_lost_machine_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    script, folder, environment = written(tmp_path, steps=400)
    process = started(script, environment)
    end = time.monotonic() + LIMIT_SECONDS
    while not (folder / "checkpoints" / "latest").exists() and time.monotonic() < end:
        time.sleep(0.05)
    (machine,) = machines_of(process.pid)
    machine.kill()
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, output
    assert "a machine was lost" in output
    assert "from step-" in output
    assert json.loads((folder / "summary.json").read_text())["steps"] == 400


@pytest.mark.long
def test_a_machine_that_shuts_down_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    """Its programs get SIGTERM before Ray sees that it is gone."""
    pytest.importorskip("ray")
    script, folder, environment = written(tmp_path, steps=400)
    process = started(script, environment)
    end = time.monotonic() + LIMIT_SECONDS
    while not (folder / "checkpoints" / "latest").exists() and time.monotonic() < end:
        time.sleep(0.05)
    inside = psutil.Process(process.pid).children(recursive=True)
    (agent,) = [one for one in inside if "torch.distributed.run" in one.cmdline()]
    agent.terminate()
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, output
    assert "SIGTERM: ended after step" in output
    assert "from step-" in output
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, 401))


def machines_of(driver: int) -> list[psutil.Process]:
    """The processes of the actors; Ray's own processes are children of the driver."""
    inside = psutil.Process(driver).children(recursive=True)
    return [one for one in inside if "ray::Machine" in " ".join(one.cmdline())]
