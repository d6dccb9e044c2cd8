"""Every rank keeps the whole model and sums the gradients of all: `allreduce`, and `ring`, its
all-reduce written out.

S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB 2020),
section 3.2: buckets, reduced while backward still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from plait.comm import Axis, Waitable, wait_all
from plait.parallel.data.as_computed import GradientsAsComputed
from plait.parallel.data.fixed_order import FixedOrderGradients, fixed_order_all_reduce
from plait.parallel.data.gradients import BucketState, GradientStore, PersistentGradients, Reducer
from plait.parallel.data.ring import ring_all_reduce
from plait.parallel.data.strategy import (
    DataGroup,
    DataStrategy,
    Replicas,
    RoundedCopies,
    Weight,
    bind,
    make_optimizer_shard,
    make_states,
    squared_norm,
)
from plait.parallel.data.units import Unit
from plait.torch_internals import allow_any_grad_dtype

RINGS_AT_ONCE = 1
"""Rings under way beside one that begins, where each holds copies of its messages."""


class AllReduce(Protocol):
    """Sums `flat` (padded_numel,) over the axis in place; `padding` of its last elements belong to
    no parameter. Collective.
    """

    def __call__(self, axis: Axis, flat: Tensor, padding: int) -> Waitable: ...


def native_all_reduce(axis: Axis, flat: Tensor, padding: int) -> Waitable:
    """The backend's own all-reduce of `flat` (padded_numel,), in place. Collective."""
    return axis.all_reduce(flat, padding=padding)


class ReplicatedParameters(DataStrategy):
    """Parameters, gradients and optimizer state whole on every rank.

    Without `all_reduce` every rank keeps its own gradients, as local SGD does.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        group: DataGroup,
        all_reduce: AllReduce | None,
        most_at_once: int | None = None,
    ) -> None:
        """`most_at_once`: buckets whose sums are under way beside one that begins; None for all."""
        super().__init__(group)
        self._most_at_once = most_at_once
        self.states = make_states(units, group.axis.size)
        self._all_reduce = fixed_order_all_reduce if group.fixed_order else all_reduce
        self._works: list[Waitable] = []
        self._masters: list[Tensor] = []
        self._flats: list[Tensor] = []
        for state in self.states:
            self._allocate(state)
        self._as_computed: GradientsAsComputed | None = None
        self.reducer = Reducer(self.states, self._make_store(), self._launch, eager=group.eager)

    def _make_store(self) -> GradientStore:
        group = self.group
        common = (self.states, group.axis, group.master_dtype, group.device)
        if group.fixed_order:
            return FixedOrderGradients(*common)
        if not group.one_backward:
            return PersistentGradients(*common, keeps=group.keeps_gradients)
        self._as_computed = store = GradientsAsComputed(*common)
        self.copies = RoundedCopies(self.pieces, self._flats)
        for piece in self.pieces:
            allow_any_grad_dtype(piece.value)
        return store

    def _allocate(self, state: BucketState) -> None:
        numel = state.bucket.padded_numel
        group = self.group
        flat = torch.zeros(numel, dtype=group.param_dtype, device=group.device)
        master = (
            flat
            if group.param_dtype == group.master_dtype
            else torch.zeros_like(flat, dtype=group.master_dtype)
        )
        for slot, view in zip(state.bucket.slots, state.bucket.views(flat), strict=True):
            bind(slot.param, view)
        self._flats.append(flat)
        self._masters.append(master)
        parts = state.bucket.parts(0, numel)
        self.pieces += [
            make_optimizer_shard(state, part, master, group, self.replicas) for part in parts
        ]

    def begin_step(self) -> None:
        if self._as_computed is not None:
            for piece in self.pieces:
                piece.value.grad = None  # backward's own tensor, whose memory the forward may take
        super().begin_step()

    def before_forward(self) -> None:
        if self._as_computed is not None:
            self._as_computed.before_forward()

    @property
    def masters(self) -> list[Tensor]:
        """The values that the optimizer updates, a flat buffer (padded_numel,) a bucket in master
        precision.
        """
        return self._masters

    @property
    def flats(self) -> list[Tensor]:
        """The weights that the next update changes, a flat buffer (padded_numel,) a bucket."""
        return self._flats

    def renew(self, memory: list[Tensor] | None) -> None:
        """Keep the weights in other buffers from here on; nothing is written into the old ones any
        more.

        `memory` has a buffer (padded_numel,) a bucket; without it new ones are made.
        """
        old = self._flats
        self._flats = [torch.empty_like(flat) for flat in old] if memory is None else memory
        for index, (flat, before) in enumerate(zip(self._flats, old, strict=True)):
            flat.copy_(before)
            if self._masters[index] is before:
                self._masters[index] = flat
        for piece in self.pieces:
            piece.value.data = piece.part.view(self._masters[piece.state.index])

    def show(self, flats: list[Tensor]) -> None:
        """Let the modules see the weights in `flats`, of this version or an older one:
        (padded_numel,) a bucket.
        """
        for state, flat in zip(self.states, flats, strict=True):
            for slot, view in zip(state.bucket.slots, state.bucket.views(flat), strict=True):
                bind(slot.param, view)

    def load(self, state: BucketState, index: int, value: Tensor) -> None:
        slot = state.bucket.slots[index]
        for flat in {
            id(flat): flat for flat in (self._masters[state.index], self._flats[state.index])
        }.values():
            flat[slot.offset : slot.stop].view(slot.shape).copy_(value)

    def _launch(self, state: BucketState) -> None:
        if self._all_reduce is not None and self._as_computed is None:
            assert state.grad is not None
            work = self._all_reduce(self.group.axis, state.grad, state.bucket.padding)
            self._works.append(work)
            if self._most_at_once is not None and len(self._works) > self._most_at_once:
                self._works[-1 - self._most_at_once].wait()

    def reduce(self) -> None:
        self.reducer.end_step()
        wait_all(self._works)
        self._works.clear()
        leaves = self._as_computed is not None and not self._as_computed.adds_up
        for piece in self.pieces:
            assert piece.state.grad is not None
            if leaves:
                piece.value.grad = piece.part.slot.param.grad
            else:
                piece.value.grad = piece.part.view(piece.state.grad)

    def publish(self) -> None:
        if self.copies is not None and self.copies.take_written():
            return
        for flat, master in zip(self._flats, self._masters, strict=True):
            if flat is not master:
                flat.copy_(master)

    @property
    def replicas(self) -> Replicas:
        return Replicas(self.group.axis.size, self.group.axis.rank)

    def squared_norm(self, weight: Weight | None = None) -> Tensor:
        """The squared norm of this rank's share of each bucket: all ranks hold the same sums.
        0-dim, float64.

        Where gradients are not summed, the squared norm of this rank's own.
        """
        if self._all_reduce is None or self._as_computed is not None:
            own = (p.value.grad for p in self.pieces if p.value.grad is not None)
            return squared_norm(own, self.group.device)
        rank = self.group.axis.rank
        shards = []
        for bucket, grad in ((state.bucket, state.grad) for state in self.states):
            is_tied = self.group.tied_copies.issuperset(slot.name for slot in bucket.slots)
            if grad is not None and not is_tied:
                shards.append((bucket, bucket.shard(grad, rank)))
        if weight is None:
            return self._sum_of_squares((("", shard) for _, shard in shards), None)
        parts = (
            (part.slot.name, part.view(shard))
            for bucket, shard in shards
            for part in bucket.shard_parts(rank)
        )
        return self._sum_of_squares(parts, weight)

    def live_tensors(self) -> dict[str, list[Tensor]]:
        return {
            "parameters": list(self._flats),
            "gradients": self._live_gradients(),
            "optimizer": [
                master
                for flat, master in zip(self._flats, self._masters, strict=True)
                if flat is not master
            ],
        }

    def _live_gradients(self) -> list[Tensor]:
        if self._as_computed is not None:
            return self._as_computed.live()
        return [state.grad for state in self.states if state.grad is not None]


def all_reduce_strategy(units: Sequence[Unit], group: DataGroup) -> ReplicatedParameters:
    """`dpN`: the backend's all-reduce."""
    return ReplicatedParameters(units, group, native_all_reduce)


def ring_strategy(units: Sequence[Unit], group: DataGroup) -> ReplicatedParameters:
    """`dpN:ring`: reduce-scatter and all-gather around a ring, over point-to-point messages.

    Where ranks read each other's memory, a message lies in a copy until it is read. There a new
    ring waits for an earlier one, so that the copies of few are there at once.
    """
    most = RINGS_AT_ONCE if group.axis.reads_peers else None
    return ReplicatedParameters(units, group, ring_all_reduce, most)


def unreduced(units: Sequence[Unit], group: DataGroup) -> ReplicatedParameters:
    """`dpN:local,everyH`: every rank keeps its own gradients; a driver exchanges weights."""
    return ReplicatedParameters(units, group, None)


Factory = Callable[[Sequence[Unit], DataGroup], DataStrategy]
