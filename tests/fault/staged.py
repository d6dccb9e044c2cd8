"""A rank of a run on processors whose snapshots are copied as a GPU copies them, but slowly.

Its streams are stand-ins. A copy has done half of its work when it pauses. So a kill finds copies
that have left the device in part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint import room
from plait.checkpoint.room import SideStream
from plait.engine.state import saves_behind, snapshots
from plait.launcher.seat import Seat
from plait.run import kept
from plait.run.job import TrainingRun
from tests.helpers.streams import FakeDevice, FakeDriver

PAUSE_SECONDS = 0.03


class StandIn(SideStream):
    """A stream of a device that is none, and whose memory is the host's."""

    def room(self, num_bytes: int) -> Tensor:
        """Memory that is not pinned, uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor [...] counts as one of the device: counts of steps do not."""
        return tensor.numel() > 1


def into_pinned_files(seat: Seat, job: TrainingRun) -> None:
    """Train; the stream writes into the files of snapshots."""
    _run(seat, job, FakeDriver())


def by_memory_between(seat: Seat, job: TrainingRun) -> None:
    """Train; the stream writes into memory of its own, and the host from there into the files."""
    _run(seat, job, FakeDriver(refuses=True))


def _run(seat: Seat, job: TrainingRun, driver: FakeDriver) -> None:
    device = FakeDevice(eager=False, driver=driver)
    own: Any = {
        "copy_each": lambda rooms, values: device.current.ask(partial(_in_two, rooms, values)),
        "side_stream_of": lambda place: StandIn(place, device),
    }
    room.copy_each = own["copy_each"]
    for module in (snapshots, saves_behind):
        module.side_stream_of = own["side_stream_of"]
    kept.run(seat, job)
    assert driver.asked, "no copy went by the stream"


def _in_two(rooms: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each of `values` [n] into one of `rooms` [n], with a pause between two halves."""
    half = len(rooms) // 2
    torch._foreach_copy_(rooms[:half], values[:half])
    time.sleep(PAUSE_SECONDS)
    torch._foreach_copy_(rooms[half:], values[half:])
