"""Flight records of ranks for tests."""

from __future__ import annotations

from plait.doctor.flight import HEADER, FlightRecorder, record_path
from plait.run.rundir import RunFolder


def gone(folder: RunFolder, rank: int) -> FlightRecorder:
    """The record of a rank of two whose process is no more: its start is that of no process."""
    recorder = FlightRecorder(rank, 2, folder.doctor)
    with record_path(folder.doctor, rank).open("r+b") as file:
        magic, pid, start, *ranks = HEADER.unpack(file.read(HEADER.size))
        file.seek(0)
        file.write(HEADER.pack(magic, pid, start + 1, *ranks))
    return recorder
