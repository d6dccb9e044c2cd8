"""Parameters of a worker of the asynchronous server: whole copies, in one flat buffer a server.

Gradients are not reduced here: the driver sends them to the servers. A rank that serves also owns
the master values of its keys, as the optimizer's shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.parallel.data.bucket import Bucket
from plait.parallel.data.gradients import BucketState, PersistentGradients, Reducer
from plait.parallel.data.server import keys_by_server
from plait.parallel.data.strategy import (
    DataGroup,
    DataStrategy,
    Replicas,
    Weight,
    bind,
    make_optimizer_shard,
    squared_norm,
)
from plait.parallel.data.units import Unit


class KeyedWeights(DataStrategy):
    """The parameters of `dpN:async-server,staleK` with K above 0.

    Attributes:
        server_ranks: the rank that serves each bucket.
        flats: the weights that the modules see, a flat buffer a bucket.
        master: master values of the keys that this rank serves, 1-D; None where it serves none.
    """

    def __init__(self, units: Sequence[Unit], group: DataGroup) -> None:
        super().__init__(group)
        num_servers = min(group.num_servers or group.num_workers, group.num_workers)
        params = [named for unit in reversed(units) for named in unit.trainable]
        self.server_ranks: list[int] = []
        self.flats: list[Tensor] = []
        self.master: Tensor | None = None
        self.served_grad: Tensor | None = None
        for server, keys in enumerate(keys_by_server(params, num_servers)):
            if keys:
                state = BucketState(Bucket.of(f"server {server}", keys, 1), len(self.states))
                self.states.append(state)
                self._allocate(state, server)
        store = PersistentGradients(
            self.states, group.axis, group.master_dtype, group.device, keeps=True
        )
        self.reducer = Reducer(self.states, store, _stays)

    def _allocate(self, state: BucketState, server: int) -> None:
        group = self.group
        bucket = state.bucket
        flat = torch.zeros(bucket.numel, dtype=group.param_dtype, device=group.device)
        for slot, view in zip(bucket.slots, bucket.views(flat), strict=True):
            bind(slot.param, view)
        self.server_ranks.append(server)
        self.flats.append(flat)
        if server == group.worker:  # the threads of the server write into this memory
            master = torch.zeros(bucket.numel, dtype=group.master_dtype, device=group.device)
            self.master = master
            self.served_grad = torch.zeros_like(master)
            parts = bucket.parts(0, bucket.numel)
            self.pieces = [
                make_optimizer_shard(state, part, master, group, self.replicas) for part in parts
            ]

    def load(self, state: BucketState, index: int, value: Tensor) -> None:
        slot = state.bucket.slots[index]
        targets = [self.flats[state.index]]
        if self.master is not None and self.server_ranks[state.index] == self.group.worker:
            targets.append(self.master)
        for flat in targets:
            flat[slot.offset : slot.stop].view(slot.shape).copy_(value)

    def bind_gradients(self, unused: frozenset[int]) -> None:
        """Let the gradient of every shard be its elements of the server's buffer.

        Slots that no worker used have none, so that the optimizer skips them.
        """
        assert self.served_grad is not None
        for piece in self.pieces:
            gone = any(piece.part.slot is piece.state.bucket.slots[index] for index in unused)
            piece.value.grad = None if gone else piece.part.view(self.served_grad)

    def unpacked(self, sent: Tensor) -> tuple[Tensor, frozenset[int]]:
        """The gradients (numel,) of this server's keys and the unused slots, from what `packed`
        made.
        """
        assert self.served_grad is not None
        grad = sent[: self.served_grad.nbytes].view(self.group.master_dtype)
        unused = sent[self.served_grad.nbytes :].nonzero().flatten().tolist()
        return grad.to(self.group.device), frozenset(unused)

    def reduce(self) -> None:
        """Gradients leave this rank with the update."""

    def squared_norm(self, weight: Weight | None = None) -> Tensor:
        """The squared norm of this rank's own gradient, over all keys. 0-dim."""
        grads = (state.grad for state in self.states if state.grad is not None)
        return squared_norm(grads, self.group.device)

    def publish(self) -> None:
        """Give all workers the servers' weights at once. Collective; no rank is in a step.

        Where ranks join and leave, a worker fetches them when its next step begins instead.
        """
        works = []
        for rank, flat in zip(self.server_ranks, self.flats, strict=True):
            if rank == self.group.worker and self.master is not None:
                flat.copy_(self.master)
            if self.group.membership is None:
                works.append(self.group.axis.broadcast(flat, rank))
        for work in works:
            work.wait()

    @property
    def replicas(self) -> Replicas:
        return Replicas(1, 0)

    def live_tensors(self) -> dict[str, list[Tensor]]:
        return {
            "parameters": list(self.flats),
            "gradients": [state.grad for state in self.states if state.grad is not None],
            "optimizer": [] if self.master is None else [self.master],
        }


def unused_slots(state: BucketState) -> frozenset[int]:
    """The slots of a bucket that got no gradient in this step."""
    return frozenset(range(len(state.bucket.slots))) - state.touched


def packed(state: BucketState) -> Tensor:
    """The gradients (numel,) of a bucket as they travel.

    Where a slot got none, they are bytes (nbytes + slots,), with a flag of each slot at their end.
    """
    assert state.grad is not None
    unused = unused_slots(state)
    if not unused:
        return state.grad
    flags = [slot in unused for slot in range(len(state.bucket.slots))]
    grad = state.grad.cpu().view(torch.uint8)
    return torch.cat((grad, torch.tensor(flags, dtype=torch.uint8)))


def _stays(state: BucketState) -> None:
    """Gradients wait here until the whole step is done."""
