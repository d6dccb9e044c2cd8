"""Runs whose agents of torchrun stand for two hosts, each with a host name and two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.comm.network import listening_store
from tests.cli.command import CONFIG, LIMIT_SECONDS

LARGER = CONFIG.replace("hidden_size = 16", "hidden_size = 128").replace(
    "intermediate_size = 32", "intermediate_size = 512"
)
PLANS = ("dp4", "dp4:zero3")
NAMED = ("unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-10


def _why_not() -> str | None:
    """The reason why no process here can have a host name of its own."""
    try:
        tried = subprocess.run(
            [*NAMED, "other", "true"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return str(error)
    return None if tried.returncode == 0 else f"no namespace of host names: {tried.stderr.strip()}"


def _trained(folder: Path, plan: str, named: bool) -> list[float]:
    """The losses of a run by two agents of two ranks."""
    (folder / "tiny.toml").write_text(LARGER)
    store = listening_store()
    train = ("train", str(folder / "tiny.toml"), "--plan", f"{plan} precision:float64")
    agents = []
    for number in (1, 2):
        meet = ("--rdzv-backend", "c10d", "--rdzv-id", "hosts", "--rdzv-conf", "is_host=0")
        at = ("--rdzv-endpoint", f"127.0.0.1:{store.port}", "--local-addr", f"127.0.0.{number}")
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        words += ["--nproc-per-node", "2", *meet, *at, "-m", "plait", *train]
        words += ["--out", str(folder / "run")]
        with (folder / f"agent-{number}.txt").open("ab") as log:
            agents.append(
                subprocess.Popen(
                    [*NAMED, f"machine{number}", *words] if named else words,
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                )
            )
    codes = [agent.wait(LIMIT_SECONDS) for agent in agents]
    assert not any(codes), [path.read_text() for path in sorted(folder.glob("agent-*.txt"))]
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
def test_two_hosts_of_two_ranks_train_as_one_does(plan: str, tmp_path: Path) -> None:
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)
    losses = []
    for named in (False, True):
        folder = tmp_path / str(named)
        folder.mkdir()
        losses.append(_trained(folder, plan, named))
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE, rel=0)
