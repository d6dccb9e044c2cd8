"""A backend of the host's memory for tensors of a GPU: each operation goes by copies on the host.

NCCL refuses ranks that share one GPU, and is missing from some machines. Gloo and shared memory
serve there. Results are those of the host's backend, bit for bit. Each operation waits for the GPU,
so this is for proofs and for small machines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.comm.backends.base import Backend, Handle, Then
from plait.paths import Paths


class ThroughHost(Backend):
    """The operations of `host`, a backend that moves the memory of processors."""

    def __init__(self, host: Backend) -> None:
        self._host = host
        self.rank = host.rank
        self.size = host.size
        self.says_waits = host.says_waits

    def follow(self, paths: Paths) -> None:
        """Follow other paths, as the backend of the host does."""
        super().follow(paths)
        self._host.follow(paths)

    def _copied(self, tensor: Tensor) -> Tensor:
        """A tensor [...] on the host: a contiguous copy, or itself if it is there."""
        return tensor if self._is_on_host(tensor) else tensor.to("cpu", copy=True).contiguous()

    def _room(self, tensor: Tensor) -> Tensor:
        """Memory on the host for what a tensor [...] receives."""
        return tensor if self._is_on_host(tensor) else torch.empty_like(tensor, device="cpu")

    def _is_on_host(self, tensor: Tensor) -> bool:
        return tensor.is_cpu

    @staticmethod
    def _then_back(handle: Handle, tensor: Tensor, on_host: Tensor) -> Handle:
        """The handle of an operation whose result `on_host` [...] goes to `tensor` [...]."""
        return handle if on_host is tensor else Then([handle], lambda: tensor.copy_(on_host))

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum in place."""
        copied = self._copied(tensor)
        return self._then_back(self._host.all_reduce(copied), tensor, copied)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Handle:
        """Sum on the host."""
        room = self._room(out)
        handle = self._host.reduce_scatter(room, self._copied(full))
        return self._then_back(handle, out, room)

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """Gather on the host."""
        room = self._room(full)
        handle = self._host.all_gather(room, self._copied(shard))
        return self._then_back(handle, full, room)

    def all_to_all(
        self, out: Tensor, source: Tensor, out_splits: list[int], source_splits: list[int]
    ) -> Handle:
        """Exchange on the host."""
        room = self._room(out)
        handle = self._host.all_to_all(room, self._copied(source), out_splits, source_splits)
        return self._then_back(handle, out, room)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        """Send from the host of `root`."""
        copied = self._copied(tensor)
        return self._then_back(self._host.broadcast(copied, root), tensor, copied)

    def reduce(self, tensor: Tensor, root: int) -> Handle:
        """Sum at the host of `root`."""
        copied = self._copied(tensor)
        handle = self._host.reduce(copied, root)
        return self._then_back(handle, tensor, copied) if self.rank == root else handle

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        """Send a copy."""
        return self._host.send(self._copied(tensor), to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Handle:
        """Receive on the host."""
        room = self._room(tensor)
        return self._then_back(self._host.receive(room, source, tag), tensor, room)

    def exchange(self, out: Tensor, tensor: Tensor, to: int, source: int) -> Handle:
        """Both on the host."""
        room = self._room(out)
        handle = self._host.exchange(room, self._copied(tensor), to, source)
        return self._then_back(handle, out, room)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._host.barrier()

    def gather_objects(self, item: object) -> list[Any]:
        """Small things of all ranks, in order."""
        return self._host.gather_objects(item)

    def close(self) -> None:
        """Close the backend of the host."""
        self._host.close()
