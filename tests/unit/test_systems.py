"""Systems other than Linux: what they lack breaks no import, and a sentence refuses ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import cast

import pytest

from plait import systems
from plait.comm import links, severance
from plait.comm.simulated import simulate
from plait.doctor import lines
from plait.errors import RunError
from plait.launcher.agent import start_server
from plait.mesh import Mesh
from plait.mesh.groups import Groups

AS_ON_WINDOWS = """
import contextlib, importlib, os, pathlib, pkgutil, signal, sys
import torch, torch.distributed, torch.utils.data, multiprocessing.forkserver

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios", "pwd", "grp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Lacking())
for name in ("HUP", "QUIT", "USR1", "USR2", "KILL", "CHLD", "RTMIN", "RTMAX", "CONT", "STOP"):
    delattr(signal, f"SIG{name}")
for name in ("fork", "sched_getaffinity", "getuid", "killpg", "statvfs"):
    delattr(os, name)

import plait

ROOMS = ("cli", "comm", "datasets", "doctor", "engine", "launcher", "parallel", "predict", "run")
for room in ROOMS:
    folder = pathlib.Path(plait.__file__).parent / room
    for path in sorted(folder.rglob("[!_]*.py")):
        inside = path.relative_to(folder).with_suffix("").parts
        if path.stem not in ("adamw_kernel",):  # which needs triton
            importlib.import_module(".".join(("plait", room, *inside)))

from plait.cli import main

sys.exit(main(["plan", "examples/first_light.toml", "--cluster", "h100x8"]))
"""


def test_planning_works_without_what_windows_lacks() -> None:
    command = [sys.executable, "-c", AS_ON_WINDOWS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "dp8" in done.stdout


@pytest.fixture
def on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "os", types.SimpleNamespace(name="nt"))


@pytest.mark.usefixtures("on_windows")
def test_ranks_are_refused_on_windows() -> None:
    with pytest.raises(RunError, match="WSL"):
        start_server()
    with pytest.raises(RunError, match="Linux and macOS alone, and this system is 'nt'"):
        simulate(Mesh(dp=1), lambda world: None)


def test_ranks_of_macos_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert start_server() == "spawn"


def test_stacks_are_asked_for_by_a_signal_that_macos_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGRTMIN")
    assert lines._spare_signal() == signal.SIGUSR2


def test_cores_are_counted_where_the_system_says_none_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert len(systems.own_cores()) == os.cpu_count()


def test_ranks_of_several_hosts_are_asked_for_no_files_that_linux_alone_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> None:
        raise FileNotFoundError("/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(links, "available", lambda: False)
    monkeypatch.setattr(links.Identity, "own", missing)
    monkeypatch.setattr(links.dist, "all_gather_object", lambda hosts, known: None)
    groups = types.SimpleNamespace(mesh=Mesh(dp=2))
    known = links.Links(cast("Groups", groups), "auto", 1.0, spans_hosts=True)
    assert known._ranks_a_host("dp") == 0


def test_connections_are_found_in_the_folder_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(severance, "DESCRIPTORS", Path("/dev/fd"))
    with socket.socket() as one:
        assert one.fileno() in severance._sockets()
