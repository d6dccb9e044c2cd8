"""A pool of rank processes, started once for the whole test session: a test on four real ranks
costs milliseconds.

The forkserver imports torch once and forks the ranks from it. Every task gets a fresh store and a
fresh World, so no test sees another's groups. A rank that raises fails the test with that rank's
traceback; ranks that then hang are killed, and the next task starts new ones.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from plait.mesh import Mesh

TIMEOUT_SECONDS = 180.0
OPERATION_SECONDS = 120.0  # eight ranks on two busy cores may be late
GRACE_SECONDS = 3.0  # for the other ranks, once one has failed
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "plait.engine.build", "pytest"]


class RanksFailed(AssertionError):
    """A rank raised, died or hung; the message holds what each of them said."""


def mesh_of(plan: str | Mesh | None, n: int) -> Mesh:
    """A mesh from a mesh, from a plan's text, or dp only."""
    if plan is None:
        return Mesh(dp=n)
    if isinstance(plan, Mesh):
        return plan
    from plait.plan import Plan

    return Mesh.of(Plan.parse(plan))


def start_server() -> None:
    """Start the server that forks ranks, with what the pool has it load."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()


class Pool:
    """`run(n, fn, *args)` calls `fn(world, *args)` on n ranks and returns the list of results."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        n: int,
        fn: Callable[..., Any],
        *args: Any,
        plan: str | Mesh | None = None,
        backend: str = "auto",
        timeout_seconds: float = TIMEOUT_SECONDS,
        may_die: Collection[int] = (),
        group_timeout_seconds: float = OPERATION_SECONDS,
    ) -> list[Any]:
        """Run on n ranks. `fn` and `args` must be picklable; a rank in `may_die` may exit, its
        result is None.
        """
        mesh = mesh_of(plan, n)
        self._grow(n)
        with tempfile.TemporaryDirectory(prefix="plait-ranks-") as folder:
            for rank in range(n):
                task = pickle.dumps(
                    (
                        fn,
                        args,
                        mesh,
                        rank,
                        str(Path(folder) / "store"),
                        backend,
                        group_timeout_seconds,
                    )
                )
                self._workers[rank][1].send_bytes(pickle.dumps((list(sys.path), task)))
            replies = self._collect(n, timeout_seconds, may_die)
        failures = [
            reply
            for reply in replies.values()
            if reply[0] != "ok" and not (reply[0] == "died" and reply[1] in may_die)
        ]
        if failures:
            raise RanksFailed(
                "\n".join(f"rank {rank} {how}:\n{what}" for how, rank, what in failures)
            )
        return [replies[rank][2] if replies[rank][0] == "ok" else None for rank in range(n)]

    def close(self) -> None:
        """Kill the ranks."""
        workers = self._workers
        self._workers = []
        for process, connection in workers:
            connection.close()
            process.kill()
        for process, _ in workers:
            process.join()

    def _grow(self, n: int) -> None:
        while len(self._workers) < n:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(
        self, n: int, timeout_seconds: float, may_die: Collection[int]
    ) -> dict[int, tuple[str, int, Any]]:
        """One reply for each rank, in order of arrival; after a failure or the time limit the
        silent ones are killed.
        """
        replies: dict[int, tuple[str, int, Any]] = {}
        deadline = time.monotonic() + timeout_seconds
        waiting = {self._workers[rank][1]: rank for rank in range(n)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    how, what = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    how = "died"
                    what = f"exit code {_exit_code(self._workers[rank][0])}"
                replies[rank] = (how, rank, what)
                if how == "raised" or (how == "died" and rank not in may_die):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in waiting.values():
            replies[rank] = (
                "hung",
                rank,
                f"no answer after {timeout_seconds} s, or {GRACE_SECONDS} s after another's "
                "failure",
            )
        if any(reply[0] != "ok" for reply in replies.values()):
            self.close()
        return replies


def _exit_code(process: Any) -> int | None:
    process.join(1.0)
    return process.exitcode


def _serve(connection: Connection) -> None:
    """The life of a rank: one task after the other, until the pool closes the connection."""
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            path, task = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        sys.path[:] = path  # what the session can import, before the function itself is unpickled
        connection.send_bytes(_reply(task))


def _reply(task: bytes) -> bytes:
    import torch

    torch.manual_seed(0)  # a module may make a model when its function is unpickled
    warnings.resetwarnings()  # a task may import what sets filters of its own
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r"tp\d+ divides no layer")  # as in pyproject.toml
    try:
        return pickle.dumps(("ok", _in_world(*pickle.loads(task))))
    except BaseException:
        return pickle.dumps(("raised", traceback.format_exc()))


def _in_world(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: Mesh,
    rank: int,
    store: str,
    backend: str,
    timeout: float,
) -> Any:
    import torch
    import torch.distributed as dist

    from plait.comm.world import init

    torch.manual_seed(0)
    world = init(
        mesh,
        rank=rank,
        store=dist.FileStore(store, mesh.size),
        backend=backend,
        timeout_seconds=timeout,
        device="cpu",
    )
    result = fn(world, *args)
    world.close()
    return result
