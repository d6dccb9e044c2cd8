"""Saves that are killed, disks that are full, files that are damaged: the checkpoint before is
whole, and the error says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plait.checkpoint import Checkpoint, Shard, folder, save
from plait.errors import CheckpointError, SaveFailed
from tests.unit.checkpoint.cuttings import save_on

OLD = 1.0
NEW = 2.0


@pytest.mark.parametrize("case", ["next", "same"])
def test_a_save_killed_at_any_effect_leaves_the_checkpoint_before(
    tmp_path: Path, case: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.fault.killed_saves",
        str(tmp_path / "checkpoints"),
        case,
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command,
        check=False,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    effects = [one["effect"] for one in rounds]
    assert {"mkdir", "open", "fsync", "rename", "replace"} <= set(effects)
    assert effects[-1] is None
    assert rounds[0]["found"] == [OLD]
    assert rounds[-1]["found"] == [NEW]
    values = [one["found"] for one in rounds]
    assert all(value in ([OLD], [NEW]) for value in values), "never a mixture"
    assert values == sorted(values), "once the new one is found, it stays"
    assert all(one["after"] == NEW + 1 for one in rounds)
    names = {"next": ["latest", "step-1", "step-2"], "same": ["latest", "step-1"]}[case]
    assert all(one["left"] == names for one in rounds), (
        "the next save clears what a killed one left"
    )


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """The checkpoints of two steps, by two ranks."""
    for step in (1, 2):
        halves = [Shard.whole(f"w{rank}", torch.arange(1000.0) * step) for rank in (0, 1)]
        save_on(tmp_path / f"step-{step}", [[halves[0]], [halves[1]]], {"step": step})
    return tmp_path


def load_all(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.names():
        checkpoint.tensor(name)


FILE = "rank-00001-of-00002.safetensors"


def test_a_missing_file_is_named(two: Path) -> None:
    (two / "step-2" / FILE).unlink()
    with pytest.raises(
        CheckpointError,
        match=rf"step-2/{FILE} is missing \([\d,]+ bytes\); .* {two}/step-1: load that one",
    ):
        Checkpoint.open(two)


@pytest.mark.parametrize("change", [-1, 5])
def test_a_file_of_the_wrong_size_is_named_with_both_sizes(two: Path, change: int) -> None:
    path = two / "step-2" / FILE
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(
        CheckpointError,
        match=rf"{FILE} is damaged: it has {size + change:,} of {size:,} bytes; .*step-1",
    ):
        Checkpoint.open(two / "step-2")


def test_every_flipped_byte_is_found(two: Path) -> None:
    path = two / "step-1" / FILE
    whole = bytearray(path.read_bytes())
    for at in [*range(0, 16), *range(16, len(whole), 97), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(
            CheckpointError,
            match=rf"{FILE} is damaged: the checksum of .* wrong; there is no checkpoint before",
        ):
            load_all(two / "step-1")
        with pytest.raises(CheckpointError, match="is damaged"):
            Checkpoint.open(two / "step-1").verify()
    path.write_bytes(whole)
    load_all(two / "step-1")


def test_what_is_not_damaged_still_loads(two: Path) -> None:
    path = two / "step-2" / FILE
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 1
    path.write_bytes(damaged)
    checkpoint = Checkpoint.open(two)
    assert checkpoint.tensor("w0")[3] == 6
    with pytest.raises(CheckpointError, match="step-1: load that one"):
        checkpoint.tensor("w1")


def test_every_flipped_byte_of_the_index_is_found(two: Path) -> None:
    path = two / "step-2" / folder.INDEX
    whole = path.read_text()
    body = whole.index('"meta"')  # before it stand format and checksum
    for at in range(body, len(whole)):
        if whole[at].isspace():
            continue
        path.write_text(whole[:at] + ("7" if whole[at] != "7" else "8") + whole[at + 1 :])
        with pytest.raises(
            CheckpointError,
            match=f"{folder.INDEX} (is damaged|cannot be read).*step-1: load that one",
        ):
            Checkpoint.open(two)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[]", "is not plait's"),
        ("{}", "is not plait's"),
        ('{"format": 9}', "has format 9 and .* reads format 1"),
    ],
)
def test_an_index_that_is_not_ours(two: Path, text: str, message: str) -> None:
    (two / "step-2" / folder.INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(two / "step-2")


def test_a_folder_without_an_index_is_no_checkpoint(two: Path) -> None:
    (two / "step-2" / folder.INDEX).unlink()
    for path in (two, two / "step-2"):
        with pytest.raises(
            CheckpointError, match=r"step-2 is no checkpoint: .*step-1: load that one"
        ):
            Checkpoint.open(path)


def test_a_rank_that_cannot_write_tells_all_and_leaves_nothing(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    results = save_on(
        two / "step-3", [[Shard.whole("a", torch.zeros(3))], [Shard.whole("b", torch.zeros(3))]]
    )
    assert all(isinstance(error, SaveFailed) and error.exit_code == 1 for error in results)
    assert all("was not saved: rank 0: [Errno 28] No space left" in str(error) for error in results)
    monkeypatch.undo()
    assert sorted(path.name for path in two.iterdir()) == ["latest", "step-1", "step-2"]
    load_all(two)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"was not saved: rank 0: .*file"):
        save(tmp_path / "file" / "step-1", [], {})
