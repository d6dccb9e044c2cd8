"""Simulated ranks for tests: `threaded(n, fn, *args, plan=...)`, the counterpart of the fixture
`ranks` in one process.

Use it where no process is needed: up to 64 ranks start in a millisecond, and a debugger sees all of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.comm.simulated import simulate
from plait.mesh import Mesh
from tests.helpers.pool import mesh_of


def threaded(
    n: int, fn: Callable[..., Any], *args: Any, plan: str | Mesh | None = None
) -> list[Any]:
    """The results of `fn(world, *args)` on n threads, by rank. `fn` may be a closure."""
    return simulate(mesh_of(plan, n), fn, *args, timeout_seconds=60.0)
