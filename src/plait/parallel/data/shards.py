"""Master values of this rank's shards, and gradients reduced into shards: shared by the ZeRO
stages.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from plait.comm import Waitable, Work, wait_all
from plait.parallel.data.fixed_order import FixedOrderGradients, FixedOrderScatter
from plait.parallel.data.gradients import (
    BucketState,
    GradientStore,
    PersistentGradients,
)
from plait.parallel.data.pooled import PooledGradients, PooledPiece
from plait.parallel.data.strategy import DataGroup, OptimizerShard, Replicas, make_optimizer_shard


def _unnamed(action: str) -> AbstractContextManager[None]:
    return nullcontext()


class MasterShards:
    """This rank's shard of every bucket in master precision, cut into the optimizer's pieces.

    `shards` are the shards (shard_numel,) in the parameters' precision, one a bucket. Where the
    precision is the same, the master is that very memory. Otherwise it is memory of its own (on the
    host, with `offload`).
    """

    def __init__(
        self, states: Sequence[BucketState], shards: Sequence[Tensor], group: DataGroup
    ) -> None:
        self._states, self._shards, self._group = states, list(shards), group
        replicas = Replicas(group.replicate.size, group.replicate.rank)
        self.owned: list[Tensor] = []
        self._masters: list[Tensor] = []
        self.pieces: list[OptimizerShard] = []
        for state, shard in zip(states, self._shards, strict=True):
            master = shard
            if shard.dtype != group.master_dtype or (group.offload and shard.device.type != "cpu"):
                master = torch.zeros_like(
                    shard, dtype=group.master_dtype, device="cpu" if group.offload else None
                )
                self.owned.append(master)
            self._masters.append(master)
            self.pieces += [
                make_optimizer_shard(state, part, master, group, replicas)
                for part in state.bucket.shard_parts(group.shard.rank)
            ]

    def load(self, state: BucketState, index: int, value: Tensor) -> None:
        """Keep this rank's elements of `value`, the full parameter of slot `index` in its shape."""
        slot = state.bucket.slots[index]
        for part in state.bucket.shard_parts(self._group.shard.rank):
            if part.slot is slot:
                elements = value.reshape(-1)[part.start : part.stop]
                for flat in (self._masters[state.index], self._shards[state.index]):
                    flat[part.offset : part.offset + part.numel].copy_(elements)

    def bind_gradients(self, grads: Sequence[Tensor]) -> None:
        """Let every piece's gradient be its elements of the reduced shards, `grads`: (shard_numel,)
        a bucket.
        """
        for piece in self.pieces:
            grad = piece.part.view(grads[piece.state.index])
            piece.value.grad = (
                grad if grad.device == piece.value.device else grad.to(piece.value.device)
            )

    def unbind_gradients(self, buckets: Container[int]) -> None:
        """Let no piece of these buckets have a gradient."""
        for piece in self.pieces:
            if piece.state.index in buckets:
                piece.value.grad = None

    def publish(self) -> None:
        """Round the masters to the parameters' precision."""
        for master, shard in zip(self._masters, self._shards, strict=True):
            if master is not shard:
                shard.copy_(master)


class ShardedGradients:
    """Reduce-scatters each bucket's gradients into this rank's shard.

    A persistent store is reduced in place, once a step. A pooled one is reduced in every backward
    and adds up here. Shards are all that stays of the gradients. Sums of a fixed order need whole
    gradients, so these are never pooled.

    Args:
        naming: says what this rank does where ranks have called different things.

    Attributes:
        store: where gradients lie before they are reduced.
        shards: this rank's reduced gradients (shard_numel,), one a bucket, in master precision.
        lent: buckets whose shards have memory from their first sum to the next step alone.
    """

    def __init__(
        self,
        states: Sequence[BucketState],
        group: DataGroup,
        *,
        pooled: bool,
        naming: Callable[[str], AbstractContextManager[None]] = _unnamed,
    ) -> None:
        self._states = states
        self._naming = naming
        self._group = group
        self._works: dict[tuple[int, int], Waitable] = {}
        """By bucket and first element."""
        self.lent: frozenset[int] = frozenset()
        axis = group.shard
        dtype = group.master_dtype
        self.store: GradientStore
        self._pool: PooledGradients | None = None
        if pooled and not group.fixed_order:
            self._pool = PooledGradients(states, axis, dtype, group.device, self._release)
            self.store = self._pool
            self.shards = [
                torch.zeros(state.bucket.shard_numel, dtype=dtype, device=group.device)
                for state in states
            ]
            if not group.keeps_gradients:
                large = [state for state in states if self._pool.goes_in_pieces(state.bucket)]
                self.lent = frozenset(state.index for state in large)
        else:
            make_store = FixedOrderGradients if group.fixed_order else PersistentGradients
            self.store = make_store(states, axis, dtype, group.device)
            self.shards = [state.bucket.shard(self._full(state), axis.rank) for state in states]

    def begin_step(self) -> None:
        """A step begins: the memory of lent shards is there for its activations and logits."""
        for index in self.lent:
            self.shards[index] = self.shards[index].new_empty(0)

    def _shard(self, state: BucketState) -> Tensor:
        """This rank's shard (shard_numel,) of a bucket, whose elements may be undefined yet."""
        shard = self.shards[state.index]
        if state.index in self.lent and not shard.numel():
            shard = self.shards[state.index] = self._made(shard, state.bucket.shard_numel)
        return shard

    @staticmethod
    def _made(like: Tensor, numel: int) -> Tensor:
        return like.new_empty(numel)

    @staticmethod
    def _full(state: BucketState) -> Tensor:
        assert state.grad is not None
        return state.grad

    def launch(self, state: BucketState) -> None:
        """Start the reduce-scatter of a bucket, or of the piece that is at hand. Collective.

        It takes (N * n,) to (n,) over N ranks.
        """
        full = self._full(state)
        axis = self._group.shard
        own = full.view(axis.size, -1)[axis.rank]
        key = (state.index, state.start)
        if self._group.fixed_order:
            self._works[key] = FixedOrderScatter(axis, own, full)
            return
        last = state.start + own.numel() == state.bucket.shard_numel
        if self._pool is not None and self._pool.is_first(state):
            own = self._shard(state)[state.start : state.start + own.numel()]
        with self._naming(_reduces(state)):
            padding = state.bucket.padding if last else 0
            self._works[key] = axis.reduce_scatter(own, full, padding=padding)

    def _release(self, piece: PooledPiece) -> None:
        """Finish the reduce-scatter of a pooled piece, and add this rank's elements of it.

        The first ones of a step are in their shard already.
        """
        index = piece.state.index
        with self._naming(_reduces(piece.state)):
            self._works.pop((index, piece.start)).wait()
        if not piece.is_first:
            piece.of(self._shard(piece.state)).add_(piece.own(self._group.shard.rank))

    def finish(self) -> None:
        """Have every shard's sum over the axis, and over the replicas of the shard. Collective."""
        with self._naming("waits for the sums of its gradients"):
            wait_all([self._works[index] for index in sorted(self._works)])
        self._works.clear()
        if self._group.replicate.size > 1:
            wait_all([self._sum_replicas(state) for state in self._states])

    def _sum_replicas(self, state: BucketState) -> Work:
        last = self._group.shard.rank == self._group.shard.size - 1
        padding = state.bucket.padding if last else 0
        return self._group.replicate.all_reduce(self.shards[state.index], padding=padding)

    def live_tensors(self) -> dict[str, list[Tensor]]:
        """Gradients and buffers that live between steps, each flat. Gradients are shards
        (shard_numel,) where they are pooled, else whole (padded_numel,).
        """
        if self._pool is not None:
            return {"gradients": list(self.shards), "buffers": list(self._pool.buffers)}
        return {"gradients": [self._full(state) for state in self._states]}


def _reduces(state: BucketState) -> str:
    return f"reduces the gradients of '{state.bucket.name}'"
