"""ZeRO-1 and ZeRO-2: every rank updates a shard of each bucket, and the shards are gathered again.

S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC
2020), section 5: P_os shards the optimizer state, P_os+g the gradients too. Both send 2(N-1)/N of
the parameters a step: a reduce-scatter of the gradients and an all-gather of the parameters. With M
micro-batches ZeRO-2 keeps no full gradients to add to, so it reduce-scatters M times: (M+1)(N-1)/N.

With `replicateM` the shards lie inside a group of N/M ranks, and each shard is summed over the M
groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plait.comm import Work, wait_all
from plait.parallel.data.gradients import (
    BucketState,
    Reducer,
)
from plait.parallel.data.shards import MasterShards, ShardedGradients
from plait.parallel.data.strategy import DataGroup, DataStrategy, Replicas, bind, make_states
from plait.parallel.data.units import Unit


class ShardedUpdate(DataStrategy):
    """Whole parameters on every rank; optimizer state, and with `shard_gradients` the gradients, in
    shards.

    Shapes: a bucket's parameters are (padded_numel,), this rank's masters (shard_numel,). Source:
    Rajbhandari et al. 2020, section 5.
    """

    def __init__(self, units: Sequence[Unit], group: DataGroup, *, shard_gradients: bool) -> None:
        super().__init__(group)
        axis = group.shard
        self.states = make_states(units, axis.size)
        self._flats = [self._allocate(state) for state in self.states]
        own = [
            state.bucket.shard(flat, axis.rank)
            for state, flat in zip(self.states, self._flats, strict=True)
        ]
        self._masters = MasterShards(self.states, own, group)
        self.pieces = self._masters.pieces
        self._gradients = ShardedGradients(self.states, group, pooled=shard_gradients)
        self.reducer = Reducer(
            self.states, self._gradients.store, self._gradients.launch, eager=group.eager
        )

    def _allocate(self, state: BucketState) -> Tensor:
        flat = self.group.shard.empty(
            state.bucket.padded_numel, self.group.param_dtype, self.group.device
        ).zero_()
        for slot, view in zip(state.bucket.slots, state.bucket.views(flat), strict=True):
            bind(slot.param, view)
        return flat

    def load(self, state: BucketState, index: int, value: Tensor) -> None:
        slot = state.bucket.slots[index]
        self._flats[state.index][slot.offset : slot.stop].view(slot.shape).copy_(value)
        self._masters.load(state, index, value)

    def begin_step(self) -> None:
        self._masters.unbind_gradients(self._gradients.lent)
        self._gradients.begin_step()
        super().begin_step()

    def reduce(self) -> None:
        self.reducer.end_step()
        self._gradients.finish()
        self._masters.bind_gradients(self._gradients.shards)

    def publish(self) -> None:
        self._masters.publish()
        works: list[Work] = []
        axis = self.group.shard
        for state, flat in zip(self.states, self._flats, strict=True):
            works.append(
                axis.all_gather(
                    flat, state.bucket.shard(flat, axis.rank), padding=state.bucket.padding
                )
            )
        wait_all(works)

    @property
    def replicas(self) -> Replicas:
        return Replicas(self.group.replicate.size, self.group.replicate.rank)

    def live_tensors(self) -> dict[str, list[Tensor]]:
        return {
            "parameters": list(self._flats),
            "optimizer": self._masters.owned,
            **self._gradients.live_tensors(),
        }


def zero1(units: Sequence[Unit], group: DataGroup) -> ShardedUpdate:
    """`dpN:zero1`: shard the optimizer state (P_os, Rajbhandari et al. 2020, section 5.1)."""
    return ShardedUpdate(units, group, shard_gradients=False)


def zero2(units: Sequence[Unit], group: DataGroup) -> ShardedUpdate:
    """`dpN:zero2`: shard the optimizer state and the gradients (P_os+g, Rajbhandari et al. 2020,
    section 5.2).
    """
    return ShardedUpdate(units, group, shard_gradients=True)
