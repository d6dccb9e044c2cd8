"""A process tells its peers that it has left, and a child of it does not."""

from __future__ import annotations

import os

from plait.comm.shm.departure import at_departure, depart


class Line:
    """Something that has peers."""


def test_a_forked_child_does_not_leave_for_its_parent() -> None:
    line = Line()
    reader, writer = os.pipe()

    def mark() -> None:
        os.write(writer, b"x")

    at_departure(line, mark)
    child = os.fork()
    if child == 0:
        depart()
        os._exit(0)
    os.waitpid(child, 0)
    os.set_blocking(reader, False)
    try:
        told = os.read(reader, 1)
    except BlockingIOError:
        told = b""
    assert told == b""
    depart()
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    os.close(writer)
