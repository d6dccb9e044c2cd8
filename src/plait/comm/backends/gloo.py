"""Gloo on CPUs, with the two operations composed that it runs slowly itself.

A reduce-scatter is one all-to-all and a local sum; an all-gather is direct sends and receives. Both send the same
bytes as Gloo's rings but in one step instead of N-1 (the numbers: benchmarks/collectives). The local sum runs in the
order of coordinates and accumulates bfloat16 in float32, so the result does not depend on timing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.backends.base import Handle, Then
from plait.comm.backends.native import Native

_ALL_GATHER_TAG = 1  # tags of the user are shifted by two beyond the own ones
_EXCHANGE_TAG = 2
_USER_TAG = 3


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """`out = rows[0] + rows[1] + ...` for rows (N, n) and out (n,); halves are accumulated in float32."""
    if rows.dtype in {torch.bfloat16, torch.float16}:
        out.copy_(rows.sum(0, dtype=torch.float32))
    else:
        torch.sum(rows, 0, out=out)


class Gloo(Native):
    """Native, but for reduce_scatter, all_gather and the sums of halves."""

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Gloo's own; halves as float32, because Gloo would round at every step of its ring."""
        if tensor.dtype not in {torch.bfloat16, torch.float16}:
            return super().all_reduce(tensor)
        wide = tensor.float()
        work = dist.all_reduce(wide, group=self.group, async_op=True)
        return Then([work], lambda: tensor.copy_(wide))

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Handle:
        """All-to-all, then the sum of what arrived."""
        arrived = torch.empty_like(full)
        work = dist.all_to_all_single(arrived, full, group=self.group, async_op=True)
        return Then([work], lambda: sum_rows(arrived.view(self.size, -1), out))

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """Everyone sends its shard to everyone, each receiving in place."""
        parts = full.view(self.size, -1)
        own = parts[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard.view(-1))
        works = []
        for step in range(1, self.size):  # each rank begins with another peer
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            works.append(dist.irecv(parts[source], group_src=source, group=self.group, tag=_ALL_GATHER_TAG))
            works.append(dist.isend(own, group_dst=to, group=self.group, tag=_ALL_GATHER_TAG))
        return Then(works)

    def reduce(self, tensor: Tensor, root: int) -> Handle:
        """Gloo's own; halves as float32."""
        if tensor.dtype not in {torch.bfloat16, torch.float16}:
            return super().reduce(tensor, root)
        wide = tensor.float()
        work = dist.reduce(wide, group_dst=root, group=self.group, async_op=True)
        return Then([work], lambda: tensor.copy_(wide) if self.rank == root else None)

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        """`dist.isend`."""
        return super().send(tensor, to, tag + _USER_TAG)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Handle:
        """`dist.irecv`."""
        return super().receive(tensor, source, tag + _USER_TAG)

    def exchange(self, out: Tensor, tensor: Tensor, to: int, source: int) -> Handle:
        """The receive first, so that it is posted when the data come."""
        receive = dist.irecv(out, group_src=source, group=self.group, tag=_EXCHANGE_TAG)
        return Then([receive, dist.isend(tensor, group_dst=to, group=self.group, tag=_EXCHANGE_TAG)])
