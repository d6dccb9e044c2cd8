"""Memory of one machine that outlives its ranks, where an agent of torchrun starts them again.

torchrun ends every rank when one is lost, and what they hold in memory. So a process of its own
holds files without a name for them, until the agent is gone. The agent is known by its number and
the moment of its start. So no rank takes what was held for an earlier agent for its own.

    python -m plait.launcher.host_memory AGENT STARTED
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plait.errors import RunError
from plait.launcher.board import Files
from plait.launcher.leftovers import PREFIX, namespace
from plait.launcher.processes import is_alive

START_SECONDS = 60.0
LOOK_SECONDS = 0.5
POLITE_SECONDS = 0.05
_STARTED_FIELD = 19  # of /proc/PID/stat, counted after the name


@dataclass(frozen=True)
class Agent:
    """The process that starts this machine's ranks: its number, and when it was started."""

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, and not another process of its number."""
        return is_alive(self.pid) and _started(self.pid) == self.started

    @property
    def folder(self) -> Path:
        """The folder of its memory's socket; the next launch sweeps it when the agent is gone."""
        name = f"{PREFIX}-{namespace()}-{self.pid}-{self.started}"
        return Path(tempfile.gettempdir()) / name


class HostMemory:
    """The files that are held for one agent, as its ranks ask for them.

    Attributes:
        host: a name of the machine and its agent, which no other has.
    """

    def __init__(self, agent: Agent) -> None:
        self.host = f"{socket.gethostname()}/{namespace()}/{agent.pid}/{agent.started}"
        self._path = str(agent.folder / "socket")

    def ask(self, make: Sequence[str] = (), drop: Sequence[str] = ()) -> dict[str, Path]:
        """Make files by name, and drop others; the paths of all that are held, by name.

        Errors: `RunError` when no agent holds them any more.
        """
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(self._path)
                line.sendall(json.dumps({"make": [*make], "drop": [*drop]}).encode() + b"\n")
                with line.makefile("r") as answer:
                    found: dict[str, str] = json.loads(answer.readline())
        except (OSError, ValueError) as error:
            raise RunError(
                f"the process that holds this machine's snapshots is gone ({error}); start the run "
                "again, or set recovery.snapshot_every = 0"
            ) from error
        return {name: Path(path) for name, path in found.items()}


def of_this_agent(*, begins: bool) -> HostMemory | None:
    """The memory of the agent that has started this process; None on a system that has none.

    One rank of the machine `begins` it, where it is not there yet; the others wait for it.
    """
    started = _started(os.getppid())
    if started is None or not hasattr(socket, "AF_UNIX"):
        return None
    agent = Agent(os.getppid(), started)
    memory = HostMemory(agent)
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            memory.ask()
        except RunError:
            if time.monotonic() > end:
                raise
            if begins:
                begin(agent)
                begins = False
            time.sleep(POLITE_SECONDS)
            continue
        return memory


def begin(agent: Agent) -> subprocess.Popen[bytes]:
    """Start the process, in a session of its own: it is not ended with the ranks."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(agent.pid), str(agent.started)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _started(pid: int) -> int | None:
    """The moment of a process's start, in ticks of the machine; None where it is unknown."""
    with suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[_STARTED_FIELD])
    return None


def _answered(question: str, files: Files, held: dict[str, Path]) -> str:
    """The answer to one line: the paths by name, after what it asks for is made and dropped."""
    asked = json.loads(question)
    for name in asked["make"]:
        if name not in held:
            held[name] = files.make()
    for name in asked["drop"]:
        if name in held:
            files.drop(held.pop(name))
    return json.dumps({name: str(path) for name, path in held.items()})


def serve(agent: Agent) -> None:
    """Hold files, and answer those who ask for them, until the agent is gone."""
    agent.folder.mkdir(mode=0o700, exist_ok=True)
    files = Files(agent.folder)
    held: dict[str, Path] = {}

    class FileRequest(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            answer = _answered(self.rfile.readline().decode(), files, held)
            self.wfile.write(f"{answer}\n".encode())

    path = agent.folder / "socket"
    path.unlink(missing_ok=True)
    with socketserver.UnixStreamServer(str(path), FileRequest) as server:
        server.timeout = LOOK_SECONDS
        while agent.is_alive:
            server.handle_request()
    files.close()
    path.unlink(missing_ok=True)
    with suppress(OSError):
        agent.folder.rmdir()


if __name__ == "__main__":
    serve(Agent(int(sys.argv[1]), int(sys.argv[2])))
