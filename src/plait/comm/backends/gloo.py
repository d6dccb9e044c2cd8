"""Gloo on CPUs, with the operations composed that it runs slowly itself.

A reduce-scatter is an all-to-all and a local sum, an all-gather an all-to-all of copies. Large
tensors take direct sends and receives instead, which copy nothing. All of them send the same bytes
as Gloo's rings but in one step instead of N-1 (the numbers: benchmarks/collectives). A small
all-reduce is an all-to-all of copies and a sum: more bytes, but what it waits for is latency. Local
sums run in the order of coordinates and accumulate halves in float32, so no result depends on
timing.

Two ranks send each other all that they add up, in one step and with the bytes of a ring. Beyond
8 MB a ring's two steps cost little, and it needs no second tensor.

Gloo's all-to-all fills a link in one direction, and then in the other. That costs nothing on one
machine, and twice the time between two. There larger tensors are sent directly. So are the parts of
an all-to-all, of any size: they differ by rank, so ranks cannot choose by it.

Gloo's own ring would round halves at every step. So two ranks exchange halves of any size and add
them up in float32. More ranks send parts to those that sum them, and gather the sums. Gathering
begins when summing has ended, so all ranks have to wait for it at once. A sum that goes on beside
other operations sends float32 there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.backends.base import Handle, Then
from plait.comm.backends.native import Native
from plait.comm.backends.sums import HALVES
from plait.comm.network import VARIABLES, loopback_interface

_ALL_GATHER_TAG = 1  # tags of the user are shifted beyond these
_EXCHANGE_TAG = 2
_REDUCE_SCATTER_TAG = 3
_EXCHANGED_SUM_TAG = 4
_ALL_TO_ALL_TAG = 5
_USER_TAG = 6


# All ranks' tensors together: up to here an all-reduce waits for latency, not for bytes.
SMALL_BYTES = 1 << 20
COPIED_BYTES = 4 << 20  # up to here the copies of an all-to-all are cheap
EXCHANGED_BYTES = 8 << 20  # up to here two ranks exchange what they add up
LINK_BYTES = 256 << 10  # up to here an all-to-all is quick between machines


class Gloo(Native):
    """Native, but for reduce_scatter, all_gather, and the sums of halves or of two ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        interface = os.environ.get(VARIABLES[0])
        self._is_local = interface is not None and interface == loopback_interface()

    @property
    def _copied_bytes(self) -> int:
        """The most bytes of all ranks together that an all-to-all gathers or scatters."""
        return COPIED_BYTES if self._is_local else LINK_BYTES

    @property
    def _swapped_bytes(self) -> int:
        """The most bytes of a tensor that two ranks exchange by an all-to-all."""
        return sys.maxsize if self._is_local else LINK_BYTES

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Two ranks exchange a small tensor, or halves. More: everyone sums a small one. Else
        Gloo's own, of halves in float32.
        """
        flat = tensor.view(-1)
        if self.size == 2:
            if self._exchanges(tensor):
                return self._exchange_and_sum(flat, flat)
            return super().all_reduce(tensor)
        if not self._is_large_sum(tensor):
            arrived, work = self._spread(flat)
            return Then([work], lambda: self.sum_into(flat, arrived.unbind()))
        if tensor.dtype not in HALVES:
            return super().all_reduce(tensor)
        wide = tensor.float()
        work = dist.all_reduce(wide, group=self.group, async_op=True)
        return Then([work], lambda: tensor.copy_(wide))

    def all_reduce_into(self, out: Tensor, source: Tensor) -> Handle:
        """Two ranks exchange `source` where it lies. Large halves of more: a part is summed by each
        rank, and gathered.
        """
        if self.size == 2:
            if out.is_contiguous() and source.is_contiguous() and self._exchanges(source):
                return self._exchange_and_sum(out.view(-1), source.view(-1))
            return super().all_reduce_into(out, source)
        if source.dtype not in HALVES or not self._is_large_sum(source):
            return super().all_reduce_into(out, source)
        numel = source.numel()
        length = -(-numel // self.size)
        full = out.view(-1) if numel == length * self.size else out.new_zeros(length * self.size)
        full[:numel].view(source.shape).copy_(source)
        part = full.view(self.size, -1)[self.rank]
        summing = self.reduce_scatter(part, full)

        def gather() -> None:
            self.all_gather(full, part).wait()
            if full.data_ptr() != out.data_ptr():
                out.view(-1).copy_(full[:numel])

        return Then([summing], gather)

    def _exchanges(self, tensor: Tensor) -> bool:
        """Whether two ranks send each other the whole `tensor` to add it up."""
        if tensor.dtype in HALVES:
            return True
        num_bytes = tensor.numel() * tensor.element_size()
        return not self.paths.beyond("gloo_exchange_bytes", num_bytes, EXCHANGED_BYTES)

    def _exchange_and_sum(self, out: Tensor, source: Tensor) -> Handle:
        """`out` (n,) becomes the sum of both ranks' `source` (n,); they may be one tensor."""
        other = torch.empty_like(source)
        rows = (source, other) if self.rank == 0 else (other, source)
        if self.paths.beyond("gloo_direct_bytes", source.nbytes, self._swapped_bytes):
            works = self._trade([other, other], [source, source], _EXCHANGED_SUM_TAG)
            return Then(works, lambda: self.sum_into(out, rows))
        lengths = [0, source.numel()] if self.rank == 0 else [source.numel(), 0]
        work = dist.all_to_all_single(
            other, source, lengths, lengths, group=self.group, async_op=True
        )
        return Then([work], lambda: self.sum_into(out, rows))

    def _is_large_sum(self, tensor: Tensor) -> bool:
        num_bytes = tensor.numel() * tensor.element_size() * self.size
        return self.paths.beyond("gloo_all_reduce_bytes", num_bytes, SMALL_BYTES)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Handle:
        """Everyone sends to everyone the part that it sums, then the sum of what arrived."""
        num_bytes = full.numel() * full.element_size()
        if not self.paths.beyond("gloo_reduce_scatter_bytes", num_bytes, self._copied_bytes):
            arrived = torch.empty_like(full)
            work = dist.all_to_all_single(arrived, full, group=self.group, async_op=True)
            return Then([work], lambda: self.sum_into(out, arrived.view(self.size, -1).unbind()))
        parts = full.view(self.size, -1).unbind()
        others = full.new_empty((self.size - 1, parts[0].numel())).unbind()
        rows = [*others[: self.rank], parts[self.rank], *others[self.rank :]]
        works = self._trade(rows, parts, _REDUCE_SCATTER_TAG)
        return Then(works, lambda: self.sum_into(out.view(-1), rows))

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """Everyone sends its shard to everyone, each receiving in place."""
        num_bytes = full.numel() * full.element_size()
        if not self.paths.beyond("gloo_all_gather_bytes", num_bytes, self._copied_bytes):
            return Then([self._spread(shard, full)[1]])
        parts = full.view(self.size, -1).unbind()
        own_part = parts[self.rank]
        if own_part.data_ptr() != shard.data_ptr():
            own_part.copy_(shard.view(-1))
        return Then(self._trade(parts, [own_part] * self.size, _ALL_GATHER_TAG))

    def all_to_all(
        self, out: Tensor, source: Tensor, out_splits: list[int], source_splits: list[int]
    ) -> Handle:
        """Gloo's own on one machine; between machines each part goes by itself."""
        if not self.paths.beyond("gloo_direct_parts", 1, 1 if self._is_local else 0):
            return super().all_to_all(out, source, out_splits, source_splits)
        into, sent = out.split(out_splits), source.split(source_splits)
        into[self.rank].copy_(sent[self.rank])
        return Then(self._trade(into, sent, _ALL_TO_ALL_TAG))

    def _trade(
        self, into: Sequence[Tensor], sent: Sequence[Tensor], tag: int
    ) -> list[dist.Work | None]:
        """Send `sent[r]` to every other rank r, and receive from it into `into[r]`.

        Each rank begins with another peer. A receive is posted before the data can come. Nothing is
        sent for an empty part.
        """
        works: list[dist.Work | None] = []
        for step in range(1, self.size):
            to = (self.rank + step) % self.size
            source = (self.rank - step) % self.size
            if into[source].numel():
                works.append(dist.irecv(into[source], group_src=source, group=self.group, tag=tag))
            if sent[to].numel():
                works.append(dist.isend(sent[to], group_dst=to, group=self.group, tag=tag))
        return works

    def _spread(self, flat: Tensor, full: Tensor | None = None) -> tuple[Tensor, dist.Work]:
        """Every rank's `flat` (n,) to every rank, by an all-to-all of copies: (N, n), into `full`
        if given.
        """
        rows = (
            flat.new_empty((self.size, flat.numel())) if full is None else full.view(self.size, -1)
        )
        copies = flat.expand(self.size, -1).contiguous()
        return rows, dist.all_to_all_single(rows, copies, group=self.group, async_op=True)

    def reduce(self, tensor: Tensor, root: int) -> Handle:
        """Gloo's own; halves as float32."""
        if tensor.dtype not in HALVES:
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
        return Then(
            [receive, dist.isend(tensor, group_dst=to, group=self.group, tag=_EXCHANGE_TAG)]
        )
