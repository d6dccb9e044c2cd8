"""The memory of a machine that is there to be taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.run import memory


def test_free_memory_is_what_the_kernel_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "_MACHINE", file)
    assert memory.free_memory_bytes() is None
    file.write_text("MemTotal:  8 kB\nMemAvailable:    3 kB\n")
    assert memory.free_memory_bytes() == 3072
    file.write_text("MemTotal:  8 kB\n")
    assert memory.free_memory_bytes() is None
