"""Ranks that share one device, as threads of this process: the `ranks` fixture's `run` for it.

On a GPU they refuse what NCCL refuses, tensors of the processor, and use what it offers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from plait.comm import World
from plait.comm.backends.base import Backend
from plait.comm.backends.through_host import ThroughHost
from plait.comm.simulated import simulate
from plait.mesh import Mesh
from tests.helpers.pool import mesh_of


class LikeNccl(ThroughHost):
    """Threads whose messages are tensors of one device, with the operations that NCCL has."""

    def __init__(self, host: Backend, device: torch.device) -> None:
        super().__init__(host)
        self._device = device

    @classmethod
    def of(cls, world: World, backend: Backend) -> LikeNccl:
        """The backend of one axis."""
        return cls(backend, world.device)

    def _is_on_host(self, tensor: Tensor) -> bool:
        if tensor.device != self._device:
            raise AssertionError(f"a message lies on {tensor.device}: NCCL would refuse it")
        return True


def sharing(device: str) -> Callable[..., list[Any]]:
    """`run(n, fn, *args, plan=...)` on n threads that share a device. Results are on the CPU."""

    def run(n: int, fn: Callable[..., Any], *args: Any, plan: str | Mesh | None = None) -> Any:
        wrap = None if device == "cpu" else LikeNccl.of
        results = simulate(mesh_of(plan, n), fn, *args, device=device, wrap=wrap)
        return tree_map(_on_host, results)

    return run


def _on_host(leaf: Any) -> Any:
    return leaf.to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def is_there() -> bool:
    """Whether this machine has a GPU that torch can use."""
    return torch.cuda.is_available()
