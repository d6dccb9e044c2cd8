"""torch.distributed as it is: the way of NCCL on GPUs, and of whatever group torch offers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from plait.comm.backends.base import Backend, Handle, Then

# torch 2.13 renamed the two and warns of the old names; 2.11 has the old ones alone
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Native(Backend):
    """Each operation is the operation of the same name in torch.distributed, on one process
    group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum in place."""
        return Then([dist.all_reduce(tensor, group=self.group, async_op=True)])

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Handle:
        """`dist.reduce_scatter_single`."""
        return Then([_reduce_scatter(out, full, group=self.group, async_op=True)])

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """`dist.all_gather_single`."""
        return Then([_all_gather(full, shard, group=self.group, async_op=True)])

    def all_to_all(
        self, out: Tensor, source: Tensor, out_splits: list[int], source_splits: list[int]
    ) -> Handle:
        """`dist.all_to_all_single`."""
        return Then(
            [
                dist.all_to_all_single(
                    out, source, out_splits, source_splits, group=self.group, async_op=True
                )
            ]
        )

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        """`dist.broadcast`."""
        return Then([dist.broadcast(tensor, group_src=root, group=self.group, async_op=True)])

    def reduce(self, tensor: Tensor, root: int) -> Handle:
        """`dist.reduce`."""
        return Then([dist.reduce(tensor, group_dst=root, group=self.group, async_op=True)])

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        """`dist.isend`; NCCL has no tags and matches by order alone."""
        return Then([dist.isend(tensor, group_dst=to, group=self.group, tag=tag)])

    def receive(self, tensor: Tensor, source: int, tag: int) -> Handle:
        """`dist.irecv`."""
        return Then([dist.irecv(tensor, group_src=source, group=self.group, tag=tag)])

    def exchange(self, out: Tensor, tensor: Tensor, to: int, source: int) -> Handle:
        """Both in one batch: NCCL deadlocks on a ring of separate sends."""
        both = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=to),
            dist.P2POp(dist.irecv, out, group=self.group, group_peer=source),
        ]
        return Then(dist.batch_isend_irecv(both))

    def barrier(self) -> None:
        """`dist.barrier`."""
        dist.barrier(group=self.group)

    def gather_objects(self, item: object) -> list[Any]:
        """`dist.all_gather_object`: between the ranks of one run, never from outside."""
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.group)
        return items
