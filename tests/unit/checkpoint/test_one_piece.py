"""Copies of a state lie as their file has them, and are written in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint import Shard
from plait.checkpoint.behind import Polite
from plait.checkpoint.file import FileWriter
from plait.checkpoint.room import Room
from plait.checkpoint.write import Prepared, write_own_file

TOKEN = "0123456789ab-0123456789abcdef"


def some_shards() -> list[Shard]:
    """Tensors of several widths, one of them empty, one of them a number."""
    values = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.arange(7, dtype=torch.bfloat16),
        "wide": torch.arange(5, dtype=torch.float64),
        "plain": torch.randn(3, 4),
        "none": torch.empty(0),
        "number": torch.tensor(3),
    }
    return [Shard.whole(name, one) for name, one in values.items()]


def written(folder: Path, shards: list[Shard], *words: Any) -> bytes:
    folder.mkdir()
    prepared = Prepared(folder, folder, TOKEN, shards, {}, {}, 0, 1)
    record = write_own_file(prepared, *words)
    return (folder / str(record["name"])).read_bytes()


def test_a_file_is_the_same_by_tensors_and_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = some_shards()
    one_by_one = written(tmp_path / "one", shards)
    pieces: list[int] = []
    write = FileWriter._write_data

    def counted(file: FileWriter, data: memoryview) -> None:
        pieces.append(len(data))
        write(file, data)

    monkeypatch.setattr(FileWriter, "_write_data", counted)
    assert written(tmp_path / "piece", Room().copy(shards), Polite()) == one_by_one
    assert sorted(pieces)[-1] == sum(shard.values.nbytes for shard in shards)


def test_the_system_gets_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write of tens of megabytes may take it ten times as long."""
    sizes: list[int] = []
    write = FileWriter._write

    def counted(file: FileWriter, data: bytes | memoryview) -> None:
        sizes.append(len(data))
        write(file, data)

    monkeypatch.setattr(FileWriter, "_write", counted)
    shards = [Shard.whole("a", torch.randn(700_000)), Shard.whole("b", torch.randn(400_000))]
    written(tmp_path / "file", Room().copy(shards))
    assert [size for size in sizes if size >= 1 << 16] == [1 << 20] * 4 + [4_400_000 - (4 << 20)]


def test_an_error_of_the_other_thread_is_raised_here() -> None:
    def fail() -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        Polite()(fail)
