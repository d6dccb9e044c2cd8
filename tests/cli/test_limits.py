"""Limits of the system end a command by one sentence, which has the number and the cure."""

from __future__ import annotations

import errno
import os
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
steps = 2
global_batch = 8
[plan]
text = "dp2"
"""
TRAIN = [sys.executable, "-m", "plait", "train", "tiny.toml", "--out", "run"]
AWAY = ["unshare", "--map-root-user", "--net"]
"""A network of its own, whose loopback interface is down."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(folder: Path, *before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, *TRAIN],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The sentence; only what the run is stands before it."""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2, done.stderr
    return lines[1]


@pytest.mark.parametrize(
    "words", [["--out", "{}"], ["--out", "{}/run", "--resume", "auto"], ["--resume", "{}"]]
)
def test_a_name_that_is_too_long(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.format("x" * 300) for word in words]
    assert main(["train", "tiny.toml", *given]) == 2
    assert "a name of 300 bytes is too long, as file systems take 255" in capsys.readouterr().err


def test_a_folder_that_a_link_names_in_vain(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").symlink_to("nowhere")
    assert main(["train", "tiny.toml", "--out", "run"]) == 2
    assert "run is a symbolic link to nowhere, which is not there" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "tiny.toml", "--out", "tiny.toml"]) == 2
    assert "folder tiny.toml is a file; choose another --out" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
@pytest.mark.parametrize("limit", [16, 32])
def test_few_files_may_be_open(limit: int, folder: Path) -> None:
    done = trained(folder, "bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash")
    assert done.returncode == 1
    assert f"the limit of {limit} for this process (ulimit -n)" in last_line(done)
    assert not (folder / "run").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
def test_a_long_path_of_temporary_files(folder: Path) -> None:
    long = folder / ("t" * 150)
    long.mkdir()
    done = trained(folder, TMPDIR=str(long))
    assert done.returncode == 2
    assert "set TMPDIR to a shorter path" in last_line(done)


def may_leave_the_network() -> bool:
    if sys.platform != "linux":
        return False
    try:
        done = subprocess.run([*AWAY, "true"], capture_output=True, check=False, timeout=30)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(not may_leave_the_network(), reason="needs a network namespace")
@pytest.mark.parametrize("plan", ["dp2", pytest.param("dp2:local,every2", marks=pytest.mark.long)])
def test_a_loopback_interface_that_is_down(plan: str, folder: Path) -> None:
    (folder / "tiny.toml").write_text(CONFIG.replace("dp2", plan))
    done = trained(folder, *AWAY)
    assert done.returncode == 1
    assert "127.0.0.1 cannot be reached (Network is unreachable)" in last_line(done)
    assert "ip link set lo up" in last_line(done)


@pytest.mark.parametrize("verb", ["status", "doctor", "report", "evaluate"])
def test_a_folder_that_only_its_owner_reads(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the system says it to another user; the one of a test may be allowed everything."""

    def denied(path: Path, *_: object, **__: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(Path, "stat", denied)
    monkeypatch.setattr(Path, "exists", denied)
    monkeypatch.setattr(Path, "is_file", denied)
    assert main([verb, str(run)]) == 2
    said = capsys.readouterr().err
    assert "permission denied; ask its owner for access to it" in said
    assert str(run) in said
