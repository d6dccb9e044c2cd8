"""Agents of torchrun on loopback addresses, each of which stands for a machine.

They meet at a store of the test's own process, so that any of them may be killed, the one with the
first rank too. An agent is killed whole: itself and every process that it has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.comm.network import listening_store
from tests.cli.command import CONFIG
from tests.fault.processes import children
from tests.fault.stacks import ask

LIMIT_SECONDS = 240.0
PACE_SECONDS = 0.8
ROOT = Path(__file__).parents[2]
RENDEZVOUS = (
    "is_host=0,last_call_timeout={last_call},keep_alive_interval=2,keep_alive_max_attempt=4"
)


class Agents:
    """The agents of one run, by number from 1. The run's folder is `run` in the given one."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        nnodes: str = "1:3",
        last_call: int = 3,
        restarts: int = 5,
        blind: int = 0,
    ) -> None:
        """`blind` is an agent that sees no other come; the ranks then end when released."""
        self.folder = folder
        self.run = folder / "run"
        self._words = words
        self._nnodes = nnodes
        self._last_call = last_call
        self._restarts = restarts
        self._blind = blind
        self._store = listening_store()
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "tiny.toml").write_text(CONFIG)

    def start(self, *numbers: int) -> None:
        """Start agents, each on a loopback address of its own."""
        for number in numbers:
            log = (self.folder / f"agent-{number}.txt").open("ab")
            self._agents[number] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.fault.stacks"),
                    *(
                        "--nnodes",
                        self._nnodes,
                        "--nproc-per-node",
                        "1",
                        "--max-restarts",
                        f"{self._restarts}",
                    ),
                    *("--rdzv-backend", "c10d", "--rdzv-id", "loopback"),
                    *("--rdzv-endpoint", f"127.0.0.1:{self._store.port}"),
                    *("--rdzv-conf", RENDEZVOUS.format(last_call=self._last_call)),
                    *("--local-addr", f"127.0.0.{number}", "-m", "tests.fault.paced"),
                    *("train", str(self.folder / "tiny.toml"), "--out", str(self.run)),
                    *self._words,
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=self._environment(number),
                start_new_session=True,
            )
            log.close()

    def _environment(self, number: int) -> dict[str, str]:
        released = str(self.folder / "released")
        return {
            **os.environ,
            **({"PACE_END": released} if self._blind else {}),
            **({"BLIND": "1"} if number == self._blind else {}),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PACE": str(self.folder / "hurry"),
            "PACE_SECONDS": str(PACE_SECONDS),
        }

    def kill(self, number: int) -> None:
        """Kill an agent, its ranks, and whatever they have started."""
        agent = self._agents.pop(number)
        everyone = [agent.pid, *children(agent.pid), *holders_of(agent.pid)]
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def kill_rank(self, number: int) -> None:
        """Kill the rank of an agent, which goes on with another."""
        agent = self._agents[number].pid
        for pid in set(children(agent)) - set(holders_of(agent)):
            os.kill(pid, signal.SIGKILL)

    def hurry(self) -> None:
        """Have steps take no longer than they need."""
        (self.folder / "hurry").touch()

    def release(self) -> None:
        """Have ranks end that have saved their last checkpoint."""
        (self.folder / "released").touch()

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Return when something is true. Fail when an agent ends before, or it takes too long."""
        end = time.monotonic() + LIMIT_SECONDS
        while not what():
            ended = [number for number, one in self._agents.items() if one.poll() is not None]
            assert not ended, (ended, self.logs())
            assert time.monotonic() < end, self.stuck()
            time.sleep(0.1)

    def steps(self) -> int:
        """The newest step that the run has told of."""
        with contextlib.suppress(OSError):
            lines = (self.run / "metrics.jsonl").read_text().splitlines()
            return max(
                (json.loads(line)["step"] for line in lines if line.endswith("}")), default=0
            )
        return 0

    def restarts(self) -> list[dict[str, Any]]:
        """The recoveries that the run's folder tells of."""
        with contextlib.suppress(OSError):
            return [*map(json.loads, (self.run / "restarts.jsonl").read_text().splitlines())]
        return []

    def codes(self) -> list[int]:
        """The exit codes of the agents that are left, once they have ended."""
        self.hurry()
        end = time.monotonic() + LIMIT_SECONDS
        while any(one.poll() is None for one in self._agents.values()):
            assert time.monotonic() < end, self.stuck()
            time.sleep(0.1)
        return [one.returncode for one in self._agents.values()]

    def finish(self) -> dict[str, Any]:
        """The summary of the run, once every agent that is left has ended well."""
        codes = self.codes()
        assert not any(codes), (codes, self.logs())
        summary: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return summary

    def end(self) -> None:
        """Leave nothing behind."""
        for number in list(self._agents):
            self.kill(number)

    def said(self, number: int) -> str:
        """The words of an agent and its ranks."""
        return (self.folder / f"agent-{number}.txt").read_text()

    def logs(self) -> str:
        """The words of all agents, for a test that fails."""
        paths = sorted(self.folder.glob("agent-*.txt"))
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in paths)

    def stuck(self) -> str:
        """The logs, once every agent and rank that is left has written its stacks into them."""
        left = [number for number, one in self._agents.items() if one.poll() is None]
        ask(self._agents[number].pid for number in left)
        return (
            f"after {LIMIT_SECONDS:g} s the agents {left} of {sorted(self._agents)} go on, "
            f"at step {self.steps()}, restarts {self.restarts()}\n{self.logs()}"
        )


def holders_of(agent: int) -> list[int]:
    """The processes that hold snapshots for an agent: they are no children of it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text().split("\0")
            if "plait.launcher.host_memory" in words and str(agent) in words:
                found.append(int(path.parent.name))
    return found
