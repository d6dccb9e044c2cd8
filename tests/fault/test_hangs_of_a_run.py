"""A rank that hangs is ended; with `[recovery] restarts` the run goes on, with equal bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.command import CONFIG, LIMIT_SECONDS, plait, write_config
from tests.fault.kills import differences
from tests.fault.processes import children, wait_until_gone
from tests.fault.test_commands import rank_processes

ROOT = Path(__file__).parents[2]
STEPS = 50
PACED = CONFIG.replace("steps = 3", f"steps = {STEPS}").replace(
    'name = "random"', 'python = "tests.fault.slow_start:data"'
)
"""Steps take a while until the file HURRY is there: a run cannot end before a rank is stopped."""


@pytest.mark.slow
def test_a_rank_that_hangs_is_replaced_and_the_bits_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry = tmp_path / "hurry"
    monkeypatch.setenv("HURRY", str(hurry))
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    write_config(tmp_path, PACED)
    words = ["train", "tiny.toml", "--plan", "dp2:zero1", "--json"]
    keys = ["recovery.restarts=1", "recovery.snapshot_every=1", "recovery.hang_seconds=5"]
    run = subprocess.Popen(
        [sys.executable, "-m", "plait", *words, "--out", "run", "--set", *keys],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    end = time.monotonic() + LIMIT_SECONDS
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.02)
    everyone = children(run.pid)
    os.kill(max(rank_processes(run.pid)), signal.SIGSTOP)
    hurry.touch()
    out, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 0, err
    (recovery,) = json.loads(out)["recoveries"]
    assert len(recovery["lost_ranks"]) == 1
    assert recovery["steps_repeated"] <= 1
    assert "goes on" in err or "go on" in err
    wait_until_gone(everyone)
    found = json.loads(plait("doctor", "run", "--json", cwd=tmp_path).out)["findings"]
    (hang,) = [one for one in found if one["kind"] == "hang"]
    assert [hang["rank"]] == recovery["lost_ranks"]
    calm = plait(*words, "--out", "calm", cwd=tmp_path)
    assert calm.code == 0, calm.err
    assert not differences(tmp_path / "run", tmp_path / "calm")
