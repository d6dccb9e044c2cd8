"""Runs on one machine listen on loopback alone, every socket of every kind of run; several machines
listen on the interface that they are given.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from plait import launch
from plait.comm import network
from plait.errors import ConfigError
from tests.cli.command import CONFIG
from tests.fault import jobs
from tests.fault.sockets import LIMIT_SECONDS, beyond_loopback, watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are read from /proc")

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
global_batch = 16

[federated]
clients = 3
rounds = 1
"""
PLAIT = ("-m", "plait")
TRAIN = (*PLAIT, "train", "tiny.toml", "--steps", "2", "--plan")
ALONE = """
import time
from plait.comm import init
from plait.mesh import Mesh
world = init(Mesh())
time.sleep(0.5)
world.close()
"""
RUNS = {
    "train dp2": (*TRAIN, "dp2"),
    "train pp2": (*TRAIN, "pp2"),
    "train async-server": (*TRAIN, "dp2:async-server,stale2"),
    "train local": (*TRAIN, "dp2:local,every1"),
    "train with restarts": (
        *(*TRAIN, "dp2:async-server,stale2"),
        *("--set", "train.restarts=1", "train.num_servers=1"),
    ),
    "verify": (*PLAIT, "verify", "tiny.toml", "--plan", "dp2", "--steps", "1"),
    "compare": (*PLAIT, "compare", "tiny.toml", "--plans", "dp1", "dp2", "--steps", "1"),
    "federated": (*PLAIT, "federated", "federation.toml", "--set", "federated.workers=2"),
    "launch": ("-m", "tests.fault.jobs", "sum"),
    "a rank that is started again": ("-m", "tests.fault.jobs", "restart"),
    "alone": ("-c", ALONE),
    "torchrun": (
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(*TRAIN, "dp2"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_every_socket_of_a_run_on_one_machine_is_on_loopback(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    _check_sockets(words, tmp_path)


@pytest.mark.long
def test_every_socket_of_a_measurement_of_the_machine_is_on_loopback(tmp_path: Path) -> None:
    _check_sockets((*PLAIT, "probe", "--out", "probe.json"), tmp_path, limit_seconds=600)


def _check_sockets(
    words: tuple[str, ...], folder: Path, limit_seconds: float = LIMIT_SECONDS
) -> None:
    (folder / "tiny.toml").write_text(CONFIG)
    (folder / "federation.toml").write_text(FEDERATION)
    root = Path(__file__).parents[2]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(root), variables.get("PYTHONPATH", "")])
    with (folder / "out").open("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, stdout=out, stderr=out, text=True, env=variables
        )
        is_own = "torch.distributed.run" not in words
        seen = watch(process, is_own=is_own, limit_seconds=limit_seconds)
    assert process.returncode == 0, (folder / "out").read_text()
    assert seen
    assert not beyond_loopback(seen)


def test_ranks_of_one_machine_are_told_to_listen_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch(jobs.variable, "PATH", nproc=1)  # the server of forks keeps the variables of its start
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert launch(jobs.variable, "GLOO_SOCKET_IFNAME", nproc=1) == [network.loopback_interface()]


@pytest.mark.parametrize(
    ("size", "local_size", "is_one"),
    [("2", "2", True), ("4", "2", False), ("2", None, False), ("1", None, True)],
)
def test_one_machine_is_known_by_its_number_of_ranks(
    size: str, local_size: str | None, is_one: bool
) -> None:
    variables = {"WORLD_SIZE": size}
    if local_size is not None:
        variables["LOCAL_WORLD_SIZE"] = local_size
    assert network.on_one_machine(variables) == is_one
    assert network.on_one_machine({})


def test_several_machines_listen_on_the_interface_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    lo = network.loopback_interface()
    assert lo is not None
    network.listen_on(lo)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == lo
    assert network.own_host(same_host=False) == network.LOOPBACK
    with pytest.raises(ConfigError, match="no network interface 'eth77'"):
        network.listen_on("eth77")


def test_the_store_of_rank_0_listens_on_that_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((network.LOOPBACK, 0)) as trial:
        port = trial.getsockname()[1]
    told = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    told |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": str(network.loopback_interface())}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = network.store_of_world(timedelta(seconds=5))
    assert store is not None
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
    socket.create_connection((network.LOOPBACK, port), timeout=5).close()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert network.store_of_world(timedelta(seconds=5)) is None


@pytest.mark.parametrize("rank", ["0", "1"])
def test_without_an_interface_all_ranks_meet_in_one_way(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in told.items():  # as Slurm's script tells: no LOCAL_WORLD_SIZE
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    assert network.store_of_world(timedelta(seconds=1)) is None
