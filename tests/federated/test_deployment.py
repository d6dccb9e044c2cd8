"""What `plait federated --deploy` writes, run as it is: a server and three clients as processes of their own, over TLS.

One client is killed and comes back, one comes with a key that nobody registered, one trusts another authority. Nothing is
timed: rounds go on until what is looked for has been seen, and `LIMIT_SECONDS` only ends a test that hangs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.config import load
from plait.federated import deploy
from tests.fault.processes import children, is_running, wait_until_gone

LIMIT_SECONDS = 240.0
NEEDED = ("openssl", "ssh-keygen")
CONFIG: dict[str, Any] = {
    "model": {"name": "mlp", "in_features": 64, "hidden_size": 8, "num_hidden_layers": 1, "out_features": 10},
    "data": {"name": "digits"},
    "train": {"global_batch": 64, "optimizer": "sgd", "lr": 0.2},
    "plan": {"text": "dp1"},
    "federated": {"clients": 3, "rounds": 10000, "min_replies": 2, "evaluate_every": 10000, "patience_seconds": 3.0},
}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs plait[federated]"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {' and '.join(NEEDED)}"),
]


class Machines:
    """Scripts that run, each with its log. All are gone when it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: set[int] = set()
        self._path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def start(self, name: str, *words: str, path: str = "", rejoin: int = 75) -> subprocess.Popen[bytes]:
        variables = {**os.environ, "PATH": path + self._path, "OMP_NUM_THREADS": "1", "PLAIT_REJOIN_SECONDS": str(rejoin)}
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, env=variables, start_new_session=True)
        self._running[name] = process
        return process

    def code(self, name: str) -> int | None:
        """How the script has ended: None while it runs."""
        return self._running[name].poll()

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def until(self, condition: Callable[[], Any], *needed: str) -> Any:
        """What the condition gives, once it is true; fails when one of `needed` ends, and after the limit."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := condition()):
            ended = [name for name in needed if self._running[name].poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(f"== {name}\n{self.log(name)[-3000:]}" for name in self._running)
                raise AssertionError(f"{f'ended: {ended}' if ended else 'not seen in time'}\n{logs}")
            time.sleep(0.1)
        return found

    def kill(self, name: str) -> None:
        """The script, and all that it has started."""
        process = self._running.pop(name)
        pids = [process.pid, *children(process.pid)]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
        self._pids.update(pids)

    def stop(self, name: str) -> None:
        """Ask the script to end, and kill what it leaves."""
        process = self._running[name]
        started = children(process.pid)
        process.terminate()
        process.wait(LIMIT_SECONDS)
        for pid in started:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self._pids.update((process.pid, *started))
        del self._running[name]

    def close(self) -> None:
        for name in list(self._running):
            self.kill(name)
        wait_until_gone(self._pids, 30.0)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.close()


def free_port(count: int) -> int:
    """The first of a server's and its clients' ports, below those that outgoing connections are given."""
    while True:
        base = random.randrange(20000, 31000)
        wanted = [base, *range(base + 10, base + 10 + count)]
        try:
            for port in wanted:
                with socket.socket() as trial:
                    trial.bind(("127.0.0.1", port))
        except OSError:
            continue
        return base


def listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def rounds(written: dict[str, Any]) -> list[tuple[int, ...]]:
    """Who answered, by round."""
    path = Path(written["rounds"])
    return [tuple(done["answered"]) for done in json.loads(path.read_text())["rounds"]] if path.exists() else []


def impostor(folder: Path, like: Path, *, key: bool) -> str:
    """The script of a client whose key nobody registered, or who trusts another authority than the server's."""
    shutil.copytree(like, folder)
    if key:
        for path in (folder / "key", folder / "key.pub"):
            path.unlink()
        deploy.client_key(folder)
    else:
        deploy.certificates(folder, folder / "authority", "127.0.0.1")
    return str(folder / "client.sh")


def test_a_federation_over_tls_bears_a_killed_client_and_refuses_strangers(tmp_path: Path, machines: Machines) -> None:
    port = free_port(5)
    written = deploy.write(load(CONFIG, []), tmp_path / "d", "127.0.0.1", port)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "plait").symlink_to("/bin/true")  # an impostor needs no engine
    machines.start("server", written["server"])
    machines.until(lambda: listens(port), "server")
    registered = machines.start("register", written["register"])
    machines.until(lambda: registered.poll() is not None, "server")
    assert registered.returncode == 0, machines.log("register")
    for number, script in enumerate(written["clients"]):
        machines.start(f"client {number}", script)
    machines.start("begin", written["begin"])

    like = tmp_path / "d" / "client-0"
    strangers = (("unregistered", True, "Failed to activate"), ("mistrusting", False, "CERTIFICATE_VERIFY_FAILED"))
    for number, (name, key, _) in enumerate(strangers):
        words = impostor(tmp_path / name, like, key=key), "--port", str(port + 13 + number), "--max-retries", "1"
        machines.start(name, *words, path=f"{tmp_path / 'nothing'}{os.pathsep}", rejoin=0)
    for name, _, why in strangers:
        assert machines.until(lambda name=name: machines.code(name), "server") != 0
        assert why in machines.log(name), machines.log(name)

    machines.until(lambda: (0, 1, 2) in rounds(written), "server", "client 0", "client 1", "client 2")
    machines.stop("client 2")
    before = len(rounds(written))
    machines.until(lambda: (0, 1) in rounds(written)[before:], "server", "client 0", "client 1")
    machines.start("client 2", written["clients"][2])
    back = len(rounds(written))
    machines.until(lambda: any(2 in who for who in rounds(written)[back:]), "server", "client 0", "client 1", "client 2")
    assert all(set(who) <= {0, 1, 2} for who in rounds(written))
