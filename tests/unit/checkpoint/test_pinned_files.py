"""Files that are memory are pinned, and a device writes into them; files on a disk never are."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint import Shard, room
from plait.checkpoint.memory import MemoryCheckpoint, MemoryFile, has_no_disk
from plait.checkpoint.room import Room, SideStream
from plait.comm.shm.snapshot_head import NOTHING, step_of
from plait.launcher.board import Files
from tests.helpers.streams import FakeDevice, FakeDriver

HOST = torch.device("cpu")
needs_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


class Unpinned(SideStream):
    """A stream whose own memory is not pinned, as no driver is here."""

    def room(self, num_bytes: int) -> Tensor:
        """Memory of the host, uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8)


def faked(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> tuple[FakeDevice, list[int]]:
    """A device that copies late, and the addresses that it writes to."""
    device = FakeDevice(eager=False, driver=driver)
    written: list[int] = []

    def asked(rooms: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        written.extend(one.data_ptr() for one in rooms)
        device.current.ask(lambda: copied(rooms, values))

    copied = room.copy_each
    monkeypatch.setattr(room, "copy_each", asked)
    return device, written


def launching(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> Any:
    """A kernel that raises what the driver's last call has left behind."""

    def kernel(*args: object, **more: object) -> Tensor:
        failed, driver.has_error = driver.has_error, False
        if failed:
            raise RuntimeError("CUDA error: operation not supported")
        return made(*args, **more)

    made: Any = torch.ones
    monkeypatch.setattr(torch, "ones", kernel)
    return kernel


@needs_memory
def test_a_device_writes_into_a_file_that_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, written = faked(monkeypatch, FakeDriver())
    files = Files(tmp_path)
    path = files.make()
    file = MemoryFile(path, Room(Unpinned(HOST, device)))
    values, count = torch.arange(5.0), torch.tensor([7])
    whole = file.begin(3, [Shard.whole("weight", values), Shard.whole("count", count)], {"a": 1})
    assert step_of(path) == NOTHING
    device.compute.ask(lambda: None)  # the next forward
    whole()
    assert step_of(path) == 3
    kept = MemoryCheckpoint([path])
    assert kept.tensor("weight").tolist() == [0, 1, 2, 3, 4]
    assert kept.meta == {"a": 1}
    start = file.content().data_ptr()
    assert all(start < place < start + file.content().numel() for place in written)
    assert len(written) == 2
    files.close()


@needs_memory
def test_a_map_is_pinned_until_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    device, _ = faked(monkeypatch, driver)
    files = Files(tmp_path)
    file = MemoryFile(files.make(), Room(Unpinned(HOST, device)))
    counts = []
    for numel in (10, 10, 1 << 18):
        file.write(1, [Shard.whole("weight", torch.ones(numel))], {})
        counts.append((driver.asked, len(driver.pinned)))
    assert counts == [(1, 1), (1, 1), (2, 1)]
    del file
    gc.collect()
    assert driver.pinned == []
    files.close()


def test_a_forked_child_leaves_the_driver_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the objects of its parent, and may collect them."""
    driver = FakeDriver()
    device, _ = faked(monkeypatch, driver)
    unpin = SideStream(HOST, device).pin(torch.zeros(8, dtype=torch.uint8))
    assert unpin is not None
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    unpin()
    assert len(driver.pinned) == 1
    monkeypatch.setattr(os, "getpid", lambda: own)
    unpin()
    assert driver.pinned == []


def test_a_file_on_a_disk_is_never_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    device, written = faked(monkeypatch, driver)
    path = tmp_path / "0"
    path.touch()
    assert not has_no_disk(path)
    file = MemoryFile(path, Room(Unpinned(HOST, device)))
    file.write(1, [Shard.whole("weight", torch.ones(9))], {})
    assert (driver.asked, len(written)) == (0, 1)
    assert MemoryCheckpoint([path]).tensor("weight").sum() == 9


@needs_memory
def test_a_refusal_ends_no_step_and_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies go by memory of their own, which both files share."""
    driver = FakeDriver(refuses=True)
    device, written = faked(monkeypatch, driver)
    kernel = launching(monkeypatch, driver)
    files = Files(tmp_path)
    memory = Room(Unpinned(HOST, device))
    paths = [files.make(), files.make()]
    for step, path in enumerate(paths, 1):
        values = torch.full((9,), float(step))
        MemoryFile(path, memory).write(step, [Shard.whole("weight", values)], {})
        assert kernel(1).item() == 1  # of the next step
        assert MemoryCheckpoint([path]).tensor("weight").tolist() == [step] * 9
    assert (driver.asked, driver.pinned) == (1, [])
    assert len(set(written)) == 1
    files.close()
