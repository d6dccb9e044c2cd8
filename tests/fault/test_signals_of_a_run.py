"""A signal ends a run after a whole checkpoint, whoever gets it, and the run goes on from there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.checkpoint import Checkpoint
from tests.cli.command import CONFIG, plait, write_config
from tests.fault.processes import children, wait_until_gone

ENDLESS = "1000000"
LIMIT_SECONDS = 120  # torchrun gives a rank 30 s to end before it starts anew


def begun(folder: Path, *words: str, python: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A training that has done its first step."""
    write_config(folder)
    launcher = python or (sys.executable, "-m", "plait")
    command = [*launcher, "train", "tiny.toml", "--out", "run", "--steps", ENDLESS, *words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    end = time.monotonic() + LIMIT_SECONDS
    while not (folder / "run" / "metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.05)
    return process


def a_rank(launcher: int) -> int:
    return max(pid for child in children(launcher) for pid in children(child))


def itself(launcher: int) -> int:
    return launcher


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whom", "number", "code"),
    [
        (itself, signal.SIGTERM, 143),
        (a_rank, signal.SIGUSR1, 138),
        pytest.param(itself, signal.SIGUSR1, 138, marks=pytest.mark.long),
        pytest.param(itself, signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param(a_rank, signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param(a_rank, signal.SIGINT, 130, marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_asked_to_end_saves_and_says_how_to_go_on(
    whom: Callable[[int], int], number: int, code: int, tmp_path: Path
) -> None:
    run = begun(tmp_path, "--set", "recovery.keep=1", "train.checkpoint_every=1")
    everyone = children(run.pid)
    os.kill(whom(run.pid), number)
    _, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == code, err
    wait_until_gone(everyone)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    steps = int(saved.name.removeprefix("step-"))
    assert f"{signal.Signals(number).name}: ended after step {steps} of {ENDLESS}" in err
    assert "go on with: plait train tiny.toml --resume run" in err
    more = ("--resume", "auto", "--steps", str(steps + 1), "--json")
    done = plait("train", "tiny.toml", "--out", "run", *more, cwd=tmp_path)
    assert done.code == 0, done.err
    assert f"into run, from {saved.name}" in done.err.splitlines()[0]
    assert (done.json()["steps"], done.json()["steps_here"]) == (steps + 1, 1)


@pytest.mark.slow
def test_the_command_to_go_on_with_is_of_the_same_run(tmp_path: Path) -> None:
    """The plan and the keys that were given beside the file are in it."""
    given = ("--plan", "dp2:zero1", "--set", "train.lr=0.0625", "recovery.keep=2")
    run = begun(tmp_path, *given)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 143, err
    before = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    _, _, command = err.strip().rpartition("go on with: ")
    words = shlex.split(command)
    assert words[:2] == ["plait", "train"]
    assert words[words.index("--steps") + 1] == ENDLESS
    words[words.index("--steps") + 1] = str(before["step"] + 1)
    done = plait(*words[1:], "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.json()["plan"] == "dp2:zero1"
    config = (tmp_path / "run" / "config.toml").read_text()
    assert "lr = 0.0625" in config
    assert "keep = 2" in config


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, pytest.param(10**6, marks=pytest.mark.long)])
def test_an_evaluation_does_not_delay_the_end(every: int, tmp_path: Path) -> None:
    """A whole one would take hours. One that was due is made when the run goes on."""
    endless = "eval.data={name='random', num_samples=100000000}"
    run = begun(tmp_path, "--set", f"eval.every={every}", endless)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 143, err
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    steps = int(saved.name.removeprefix("step-"))
    short = "eval.data={name='random', num_samples=8}"
    more = ("--resume", "auto", "--steps", str(steps + 1), "--set", f"eval.every={every}", short)
    done = plait("train", "tiny.toml", "--out", "run", *more, cwd=tmp_path)
    assert done.code == 0, done.err
    rows = (tmp_path / "run" / "eval.jsonl").read_text().splitlines()
    due = [steps, steps + 1] if every == 1 else [steps + 1]
    assert [json.loads(row)["step"] for row in rows] == due


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs coreutils")
def test_a_run_whose_time_is_over_saves(tmp_path: Path) -> None:
    """`timeout` sends SIGTERM to the launcher and then to all processes, so twice to that one.

    Its own alarm goes off early here, once the first step is done.
    """
    timeout = ("timeout", "--preserve-status", "1000", sys.executable, "-m", "plait")
    run = begun(tmp_path, python=timeout)
    everyone = children(run.pid)
    os.kill(run.pid, signal.SIGALRM)
    _, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 143, err
    wait_until_gone(everyone)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    steps = int(saved.name.removeprefix("step-"))
    assert f"SIGTERM: ended after step {steps} of {ENDLESS}" in err
    assert "go on with: plait train tiny.toml --resume run" in err
    Checkpoint.open(saved)


@pytest.mark.slow
def test_an_echo_of_a_signal_leaves_a_run_its_time_to_save(tmp_path: Path) -> None:
    run = begun(tmp_path)
    everyone = children(run.pid)
    rank = a_rank(run.pid)
    os.kill(rank, signal.SIGSTOP)  # so that no step ends between the two
    run.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert run.poll() is None
    os.kill(rank, signal.SIGCONT)
    _, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 143, err
    wait_until_gone(everyone)
    assert "go on with: plait train tiny.toml --resume run" in err


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    run = begun(tmp_path)
    everyone = children(run.pid)
    os.kill(a_rank(run.pid), signal.SIGSTOP)  # so that no step ends
    run.send_signal(signal.SIGTERM)
    time.sleep(1.0)  # as a person does, who sees that the run goes on
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 143
    wait_until_gone(everyone)


@pytest.mark.slow
def test_a_run_that_cannot_save_by_the_deadline_fails(tmp_path: Path) -> None:
    run = begun(tmp_path, "--set", "recovery.deadline_seconds=0.5")
    everyone = children(run.pid)
    os.kill(a_rank(run.pid), signal.SIGSTOP)
    run.send_signal(signal.SIGUSR1)
    _, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 1
    assert "SIGUSR1 came, and no checkpoint was whole after 0.5 s" in err
    assert "go on with --resume auto" in err  # which also starts a run that has saved nothing
    wait_until_gone(everyone)


@pytest.mark.slow
def test_resume_auto_falls_back_past_a_damaged_checkpoint(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG.replace("steps = 3", "steps = 3\ncheckpoint_every = 1"))
    command = ("train", "tiny.toml", "--out", "run", "--plan", "dp1", "--json")
    assert plait(*command, cwd=tmp_path).code == 0
    newest = tmp_path / "run" / "checkpoints" / "step-00000003"
    (file,) = newest.glob("rank-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    done = plait(*command, "--resume", "auto", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "step-00000003 is damaged, the one before it is tried" in done.err
    assert "into run, from step-00000002" in done.err
    for steps, then in (
        ((3,), "the one before it is tried"),
        ((3, 2, 1), "no other is whole, and the run starts over"),
    ):
        for step in steps:
            (newest.with_name(f"step-{step:08d}") / "checkpoint.json").write_text("{")
        done = plait(*command, "--resume", "auto", cwd=tmp_path)
        assert done.code == 0, done.err
        assert f"step-00000003 is damaged, {then}: not all of its files" in done.err


@pytest.mark.slow
def test_a_run_under_torchrun_saves_and_its_restart_goes_on(tmp_path: Path) -> None:
    """A rank is killed, torchrun starts both anew, and the same command continues the folder."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    python = (*torchrun, "--max-restarts", "1", "-m", "plait")
    run = begun(tmp_path, "--set", "train.checkpoint_every=1", python=python)
    end = time.monotonic() + LIMIT_SECONDS
    latest = tmp_path / "run" / "checkpoints" / "latest"
    while not latest.exists() and time.monotonic() < end:
        time.sleep(0.05)
    before = set(children(run.pid))
    os.kill(max(before), signal.SIGKILL)
    while before & set(children(run.pid)) and time.monotonic() < end:
        time.sleep(0.05)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    while (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") <= lines + 3:
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)
    everyone = children(run.pid)
    os.kill(max(everyone), signal.SIGTERM)
    _, err = run.communicate(timeout=LIMIT_SECONDS)
    assert ", into run, from step-" in err, err
    assert "plait train: SIGTERM: ended after step " in err, err
    wait_until_gone(everyone)
