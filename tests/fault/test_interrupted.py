"""A process that is asked to end leaves none of those behind that it has started: a test session, a
simulated federation.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fault.processes import children, wait_until_gone

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60.0

FOREVER = """
import time

def test_that_never_ends(machines, tmp_path):
    machines.start("forever", "sh", "-c", "sleep 1000 & sleep 1000")
    time.sleep(1000)
"""

FEDERATION = """
[model]
name = "mlp"
in_features = 64
hidden_size = 8
num_hidden_layers = 1
out_features = 10
[data]
name = "digits"
[train]
global_batch = 64
[federated]
clients = 2
rounds = 1000000
workers = 2
"""


def asked_to_end(words: Sequence[str], num_started: int) -> int:
    """Terminate a command once that many processes live under it; its exit code, when all of them
    are gone.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        [sys.executable, "-m", *words], cwd=ROOT, env=variables, **quiet
    ) as command:  # type: ignore[call-overload]
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(started := children(command.pid)) < num_started:
            assert command.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        command.send_signal(signal.SIGTERM)
        code = int(command.wait(LIMIT_SECONDS))
    wait_until_gone(started, 30.0)
    return code


def test_a_session_that_is_asked_to_end_takes_down_what_its_tests_have_started(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_forever.py").write_text(FOREVER)
    plugins = "-p", "tests.conftest", "-p", "tests.federated.machines"
    assert (
        asked_to_end(
            ["pytest", *plugins, "-c", os.devnull, f"--rootdir={tmp_path}", str(tmp_path)], 3
        )
        == 2
    )


def test_a_simulation_that_is_asked_to_end_takes_its_workers_along(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(FEDERATION)
    assert asked_to_end(["plait", "federated", str(tmp_path / "federation.toml")], 6) == 143
