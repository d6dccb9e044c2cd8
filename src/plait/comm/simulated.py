"""Simulated ranks: the ranks of a mesh as threads of this process, with everything a real world
has.

Communication runs the same code as between processes of one host. Random numbers and default dtypes
are the process's, so ranks that draw should use their own generators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from plait.comm.backends.base import Backend
from plait.comm.shm.threads import Hub, ThreadFabric, Threads
from plait.comm.world import World
from plait.mesh import AxisName, Mesh
from plait.values import PyTree

T = TypeVar("T")
Wrap = Callable[[World, Backend], Backend]
"""From a rank's world and the backend of one of its axes to the backend that the axis gets."""


def simulate(
    mesh: Mesh,
    fn: Callable[..., T],
    *args: object,
    timeout_seconds: float = 60.0,
    wrap: Wrap | None = None,
    device: torch.device | str = "cpu",
) -> list[T]:
    """Call `fn(world, *args)` on every rank of the mesh, each in a thread; the results by rank.

    `wrap` may put a backend of its own round each, for instance one that writes down its calls. All
    ranks share `device`. The backward of each runs in its own thread there, too.

    Raises:
        Exception: what the first failing rank raised, with a note that names the rank.
    """
    hub = Hub(timeout_seconds)
    place = torch.device(device)
    results: list[PyTree] = [None] * mesh.size
    failures: list[tuple[int, BaseException]] = []

    def live(rank: int) -> None:
        try:
            # torch has one thread a GPU for the backwards of all; a rank in it would wait for ever
            with torch.autograd.set_multithreading_enabled(place.type == "cpu"):
                results[rank] = fn(_world(mesh, rank, hub, wrap, place), *args)
        except BaseException as error:  # handed to the caller below
            failures.append((rank, error))
            hub.fail(rank)

    threads = [
        threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in mesh
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error = next((f for f in failures if f[0] == hub.failed), failures[0])
        if hasattr(error, "add_note"):
            error.add_note(f"raised by simulated rank {rank} of {mesh.size}")
        raise error
    return results


def _world(mesh: Mesh, rank: int, hub: Hub, wrap: Wrap | None, device: torch.device) -> World:
    def connect(name: AxisName) -> Backend:
        line = mesh.line(rank, name)
        fabric = ThreadFabric(hub, (name, line), line.index(rank), len(line), device)
        backend = Threads(fabric)
        return backend if wrap is None else wrap(world, backend)

    world = World(mesh, rank, device, connect, lambda: None, is_simulated=True)
    return world
