"""Ranks that share one device, as threads of this process: the `ranks` fixture's `run` for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from plait.comm.simulated import simulate
from plait.mesh import Mesh
from tests.helpers.pool import mesh_of


def sharing(device: str) -> Callable[..., list[Any]]:
    """`run(n, fn, *args, plan=...)` on n threads that share a device. Results are on the CPU."""

    def run(n: int, fn: Callable[..., Any], *args: Any, plan: str | Mesh | None = None) -> Any:
        results = simulate(mesh_of(plan, n), fn, *args, device=device)
        return tree_map(_on_host, results)

    return run


def _on_host(leaf: Any) -> Any:
    return leaf.to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def is_there() -> bool:
    """Whether this machine has a GPU that torch can use."""
    return torch.cuda.is_available()
