"""What goes wrong on the command line is a clear message and an exit code, within seconds, and
leaves no process behind.
"""

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
from tests.fault.processes import children, wait_until_gone

BAD_INPUT = {
    "wrong world size": (
        ["--nproc", "3"],
        "plan 'dp2:zero1' needs 2 ranks (dp2) but 3 were started",
    ),
    "batch that does not divide": (
        ["--plan", "dp16"],
        "global_batch 8 leaves some of its dp16 x mb1 = 16 micro-batches",
    ),
    "plan that cannot be read": (["--plan", "dp2:zreo1"], "did you mean"),
    "pair of words that cannot run": (
        ["--plan", "tp2 remat:selective compile"],
        "cuts each block into several",
    ),
    "unknown key": (["--set", "train.stpes=3"], "unknown key train.stpes; did you mean 'steps'?"),
    "unknown section": (
        ["--set", "trian.steps=3"],
        "unknown section 'trian'; did you mean 'train'?",
    ),
    "unknown option": (["--stpes", "3"], "unknown option --stpes; did you mean '--steps'?"),
    "nothing to resume": (["--resume"], "there is no run of 'tiny' with a checkpoint"),
    "text that cannot be read": (
        ["--set", "data.name=text", "data.files=['nowhere.txt']", "model.vocab_size=256"],
        "nowhere.txt",
    ),
    "folder that is taken": (["--out", "."], "not empty"),
}


@pytest.mark.parametrize(("words", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_exit_code_2_and_one_message(
    words: list[str], message: str, tmp_path: Path
) -> None:
    write_config(tmp_path)
    done = plait("train", "tiny.toml", *words, cwd=tmp_path)
    assert (done.code, done.out) == (2, ""), done.err
    assert message in done.err
    assert "Traceback" not in done.err
    assert not list(
        tmp_path.glob("runs/*")
    )  # what failed before its first step leaves nothing behind


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nowhere.toml", None, "nowhere.toml: there is no such file"),
        ("bad.toml", "[model\n", "bad.toml: this is not valid TOML"),
        (".", None, "this is a directory"),
    ],
)
def test_a_config_that_cannot_be_read_is_said(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    done = plait("train", name, "--json", cwd=tmp_path)
    assert done.code == 2
    assert message in done.json()["error"]
    assert message in done.err


def test_a_loss_that_is_no_number_names_the_step_and_is_exit_code_1(tmp_path: Path) -> None:
    write_config(tmp_path)
    words = (
        "--set",
        "train.lr=1e30",
        "train.optimizer=sgd",
        "--steps",
        "20",
        "--out",
        "run",
        "--json",
    )
    done = plait("train", "tiny.toml", *words, cwd=tmp_path)
    assert done.code == 1, done.err
    assert done.json()["kind"] == "NonFiniteLoss"
    assert "step " in done.json()["error"]
    assert "Traceback" not in done.err
    assert (tmp_path / "run" / "metrics.jsonl").read_text()  # what was done is on disk


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert plait("train", "tiny.toml", "--steps", "1", "--out", "run", cwd=tmp_path).code == 0
    words = ("--resume", "run", "--steps", "2", "--set", "model.hidden_size=32", "--json")
    done = plait("train", "tiny.toml", *words, cwd=tmp_path)
    assert (done.code, done.json()["kind"]) == (2, "CheckpointError"), done.err


def test_torchruns_world_of_another_size_is_refused_on_every_rank(tmp_path: Path) -> None:
    write_config(tmp_path)
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "plait",
    )
    done = plait("train", "tiny.toml", "--plan", "dp4", cwd=tmp_path, python=torchrun)
    assert done.code != 0
    assert "needs 4 ranks (dp4) but 2 were started" in done.err


@pytest.fixture
def long_run(tmp_path: Path) -> subprocess.Popen[str]:
    """A training that would go on for long, past its first steps."""
    write_config(tmp_path, CONFIG.replace("steps = 3", "steps = 1000000"))
    command = [sys.executable, "-m", "plait", "train", "tiny.toml", "--out", "run", "--json"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    )
    end = time.monotonic() + 60
    while not ((tmp_path / "run" / "metrics.jsonl").exists()) and time.monotonic() < end:
        time.sleep(0.05)
    return process


def rank_processes(launcher: int) -> list[int]:
    """The ranks: the grandchildren that the fork server has made."""
    return [pid for child in children(launcher) for pid in children(child)]


def test_a_killed_rank_ends_the_run_and_is_named(long_run: subprocess.Popen[str]) -> None:
    everyone = children(long_run.pid)
    ranks = rank_processes(long_run.pid)
    assert len(set(ranks)) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    out, err = long_run.communicate(timeout=LIMIT_SECONDS)
    assert long_run.returncode == 1
    assert "was killed by SIGKILL" in json.loads(out)["error"]
    assert json.loads(out)["kind"] == "RankFailed"
    assert "Traceback" not in err
    wait_until_gone(everyone)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_every_rank(
    long_run: subprocess.Popen[str], number: int, code: int
) -> None:
    everyone = children(long_run.pid)
    long_run.send_signal(number)
    out, err = long_run.communicate(timeout=LIMIT_SECONDS)
    assert (long_run.returncode, json.loads(out)["kind"]) == (code, signal.Signals(number).name)
    assert "Traceback" not in err
    wait_until_gone(everyone)


def test_a_run_that_was_killed_goes_on_and_a_second_one_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG.replace("steps = 3", "steps = 1000000\ncheckpoint_every = 2"))
    command = [sys.executable, "-m", "plait", "train", "tiny.toml", "--out", "run", "--plan", "dp1"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, env=variables)
    end = time.monotonic() + 60
    while not (tmp_path / "run" / "checkpoints" / "latest").exists() and time.monotonic() < end:
        time.sleep(0.05)
    everyone = children(process.pid)
    resume = ("train", "tiny.toml", "--plan", "dp1", "--out", "run", "--resume")
    second = plait(*resume, "auto", cwd=tmp_path)
    process.kill()
    process.communicate()
    wait_until_gone(everyone)
    assert second.code == 2
    assert f"in use by another run (process {process.pid})" in second.err
    reached = max(int(path.name[5:13]) for path in (tmp_path / "run/checkpoints").glob("step-*"))
    words = ("--steps", str(reached + 1), "--json")
    done = plait(*resume, "latest", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert ", from step-" in done.err
    assert done.json()["steps"] == reached + 1
    again = plait(*resume, "auto", "--steps", str(reached + 1), "--json", cwd=tmp_path)
    assert again.code == 0, again.err
    assert plait("report", "run", cwd=tmp_path).code == 0


def test_a_rank_that_stops_is_named_within_hang_seconds(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG.replace("steps = 3", "steps = 1000000"))
    command = [sys.executable, "-m", "plait", "train", "tiny.toml", "--plan", "dp3"]
    command += [
        "--out",
        "run",
        "--json",
        "--set",
        "recovery.hang_seconds=6",
        "train.global_batch=9",
    ]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    )
    end = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.05)
    everyone = children(run.pid)
    stopped = max(rank_processes(run.pid))
    os.kill(stopped, signal.SIGSTOP)
    out, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 1
    error = json.loads(out)["error"]
    assert f"process {stopped}) was silent for 6 s" in error, error
    assert "waiting for rank " in err
    wait_until_gone(everyone)


@pytest.mark.parametrize(
    ("number", "code", "plan"),
    [
        (signal.SIGINT, 130, "dp2:local,every2"),
        (signal.SIGTERM, 143, "dp2:local,every3"),
        (signal.SIGUSR1, 138, "dp2:async-server,stale2"),
    ],
)
@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_ends_a_run_with_restarts(
    number: int, code: int, plan: str, to_group: bool, tmp_path: Path
) -> None:
    """It saves first, and says how to go on."""
    write_config(tmp_path, CONFIG.replace("steps = 3", "steps = 1000000"))
    command = [sys.executable, "-m", "plait", "train", "tiny.toml", "--plan", plan]
    command += ["--out", "run", "--json", "--set", "train.restarts=2"]
    command += ["train.num_servers=1"] if "server" in plan else []
    run = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    end = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.05)
    everyone = children(run.pid)
    if to_group:
        os.killpg(run.pid, number)  # as a terminal does
    else:
        run.send_signal(number)
    out, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == code, err
    assert json.loads(out)["kind"] == signal.Signals(number).name
    assert "Traceback" not in err
    assert "killed by" not in err
    wait_until_gone(everyone)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    steps = int(saved.name.removeprefix("step-"))
    assert f"{signal.Signals(number).name}: ended after step {steps} of 1000000" in err
