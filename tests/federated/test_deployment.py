"""What `plait federated --deploy` writes, run as it is: a server and three clients as processes of
their own, over TLS.

One client is killed and comes back, one comes with a key that nobody registered, one trusts another
authority. Nothing is timed: rounds go on until what is looked for has been seen, and the limits of
`machines` only end a test that hangs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from plait.config import load
from plait.outer.federated import deploy
from tests.federated.machines import Machines
from tests.federated.tables import DIGITS

NEEDED = ("openssl", "ssh-keygen")
CONFIG: dict[str, Any] = {
    **DIGITS,
    "train": {"global_batch": 64, "optimizer": "sgd", "lr": 0.2},
    "plan": {"text": "dp1"},
    "federated": {
        "clients": 3,
        "rounds": 10000,
        "min_replies": 2,
        "evaluate_every": 10000,
        "patience_seconds": 3.0,
    },
}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs plait[federated]"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {' and '.join(NEEDED)}"),
]


def free_port(count: int) -> int:
    """The first of a server's and its clients' ports, below those that outgoing connections are
    given.
    """
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
    return (
        [tuple(done["answered"]) for done in json.loads(path.read_text())["rounds"]]
        if path.exists()
        else []
    )


def serve(machines: Machines, written: dict[str, Any], port: int) -> None:
    """Start the server, which then knows the keys of its clients."""
    machines.start("server", written["server"])
    machines.until(lambda: listens(port), "server")
    registered = machines.start("register", written["register"])
    machines.until(lambda: registered.poll() is not None, "server")
    assert registered.returncode == 0, machines.log("register")


def impostor(folder: Path, like: Path, *, key: bool) -> str:
    """The script of a client whose key nobody registered, or who trusts another authority than the
    server's.
    """
    shutil.copytree(like, folder)
    if key:
        for path in (folder / "key", folder / "key.pub"):
            path.unlink()
        deploy.client_key(folder)
    else:
        deploy.certificates(folder, folder / "authority", "127.0.0.1")
    return str(folder / "client.sh")


def test_a_federation_over_tls_bears_a_killed_client_and_refuses_strangers(
    tmp_path: Path, machines: Machines
) -> None:
    port = free_port(5)
    written = deploy.write(load(CONFIG, []), tmp_path / "d", "127.0.0.1", port)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "plait").symlink_to("/bin/true")  # an impostor needs no engine
    serve(machines, written, port)
    for number, script in enumerate(written["clients"]):
        machines.start(f"client {number}", script)
    machines.start("begin", written["begin"])

    like = tmp_path / "d" / "client-0"
    strangers = (
        ("unregistered", True, "Failed to activate"),
        ("mistrusting", False, "CERTIFICATE_VERIFY_FAILED"),
    )
    for number, (name, key, _) in enumerate(strangers):
        words = (
            impostor(tmp_path / name, like, key=key),
            "--port",
            str(port + 13 + number),
            "--max-retries",
            "1",
        )
        machines.start(name, *words, path=f"{tmp_path / 'nothing'}{os.pathsep}", rejoin=0)
    for name, _, why in strangers:
        assert machines.until(lambda name=name: machines.code(name), "server") != 0
        assert why in machines.log(name), machines.log(name)

    machines.until(
        lambda: (0, 1, 2) in rounds(written), "server", "client 0", "client 1", "client 2"
    )
    machines.stop("client 2")
    before = len(rounds(written))
    machines.until(lambda: (0, 1) in rounds(written)[before:], "server", "client 0", "client 1")
    machines.start("client 2", written["clients"][2])
    back = len(rounds(written))
    machines.until(
        lambda: any(2 in who for who in rounds(written)[back:]),
        "server",
        "client 0",
        "client 1",
        "client 2",
    )
    assert all(set(who) <= {0, 1, 2} for who in rounds(written))

    for name in ("begin", "server", "client 0", "client 1", "client 2"):
        machines.kill(name)
    done = rounds(written)
    serve(machines, written, port)
    for number, script in enumerate(written["clients"]):
        machines.start(f"client {number}", script)
    machines.start("begin", written["begin"])
    machines.until(
        lambda: len(rounds(written)) > len(done), "server", "client 0", "client 1", "client 2"
    )
    assert rounds(written)[: len(done)] == done
