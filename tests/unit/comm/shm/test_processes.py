"""Who lives: a zombie is dead, and so is another process with a used process id."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.comm.shm.processes import Identity, _start_of
from plait.comm.shm.semaphores import available

pytestmark = pytest.mark.skipif(not available(), reason="reads /proc (Linux)")


def test_this_process_lives_and_shares_its_host_with_itself():
    own = Identity.own()
    assert own.alive()
    assert own.same_host(own)
    for field in ("host", "boot", "namespace"):
        assert not own.same_host(dataclasses.replace(own, **{field: "other"}))


def test_another_process_with_the_same_id_is_another_process():
    assert not dataclasses.replace(Identity.own(), start="1").alive()


def test_a_zombie_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = dataclasses.replace(Identity.own(), pid=child.pid, start=_start_of(child.pid) or "")
    assert identity.alive()
    child.kill()  # and not yet waited for
    deadline = time.monotonic() + 10
    while (
        Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert not identity.alive()
    child.communicate()
    assert not identity.alive()
