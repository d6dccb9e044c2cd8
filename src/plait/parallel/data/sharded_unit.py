"""The life of a unit's parameters under ZeRO-3: gathered from all ranks, used, and freed again.

A freed unit keeps its tensor objects and only its storage shrinks to nothing. Autograd still refers
to its saved parameters, and finds them again once the storage has been filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from plait.comm import Work
from plait.errors import ModelError
from plait.mesh import Shard
from plait.parallel.data.absent import Absent, Wanted, become
from plait.parallel.data.bucket import Bucket
from plait.parallel.data.strategy import DataGroup, RunningForward, bind
from plait.parallel.data.units import Unit
from plait.torch_internals import has_function_transforms, has_storage, storage_of


class UnitState(Enum):
    """The states of a unit, and the owner of its full buffer in each.

    The parameters of the unit are views of that buffer all the time. This rank's shard is memory of
    its own, which belongs to the optimizer in every state.

        SHARDED    no owner: the buffer has no bytes, and its parameters tell who reads them
        GATHERING  the collective: an all-gather fills the buffer, and nothing else may touch it
        WHOLE      the modules of the unit, and the autograd graph that saved their parameters
        RESTING    the same graph: no call is under way, and the parameters tell who reads them
        TAKEN      the step, until it ends: code took a parameter outside of its module's call, or
                   `[plan] keep_gathered` has the unit

    The verbs of `ShardedUnit` are the arrows, and what is not listed changes nothing:

        prefetch   SHARDED -> GATHERING
        unshard    SHARDED or GATHERING or RESTING -> WHOLE
        rest       WHOLE -> RESTING
        take       SHARDED or GATHERING or WHOLE or RESTING -> TAKEN
        reshard    GATHERING or WHOLE or RESTING -> SHARDED
        release    TAKEN -> SHARDED
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"
    RESTING = "resting"
    TAKEN = "taken"


class Freed(Absent):
    """A parameter [...] of a unit that is not in use."""

    where = "in shards"


class GatheredBucket:
    """The memory of one bucket: this rank's shard (shard_numel,), and the full flat buffer
    (padded_numel,) that comes and goes.
    """

    def __init__(self, bucket: Bucket, group: DataGroup, take: Wanted) -> None:
        """`take` is called with a freed parameter that code reads; it may leave it freed."""
        self.bucket = bucket
        self._take = take
        self._axis = group.shard
        self.shard = self._empty_shard(group)
        self._full = torch.empty(bucket.padded_numel, dtype=group.param_dtype, device=group.device)
        self._bytes = self._full.untyped_storage().nbytes()
        self._work: Work | None = None
        self._kinds = [type(slot.param) for slot in bucket.slots]
        self._freed_kinds = [Freed.kind(kind, self._not_here) for kind in self._kinds]
        for slot, view in zip(bucket.slots, bucket.views(self._full), strict=True):
            bind(slot.param, view)
        self.free()

    def _empty_shard(self, group: DataGroup) -> Tensor:
        numel = self.bucket.shard_numel
        return group.shard.empty(numel, group.param_dtype, group.device).zero_()

    def load(self, index: int, value: Tensor) -> None:
        """Keep this rank's elements of `value`, the full parameter of slot `index` in its shape."""
        for part in self.bucket.shard_parts(self._axis.rank):
            if part.slot is self.bucket.slots[index]:
                part.view(self.shard).reshape(-1).copy_(value.reshape(-1)[part.start : part.stop])

    def shards(self) -> list[Shard]:
        """This rank's elements of each parameter."""
        parts = self.bucket.shard_parts(self._axis.rank)
        return [part.shard(part.view(self.shard)) for part in parts]

    def gather(self) -> None:
        """Give the buffer its bytes, and start the all-gather that fills them. Collective."""
        self._full.untyped_storage().resize_(self._bytes)
        self._work = self._axis.all_gather(self._full, self.shard, padding=self.bucket.padding)

    def wait(self) -> None:
        """Have the buffer filled, after `gather`."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self.wake()

    def wake(self) -> None:
        """Let the parameters be like any others."""
        for slot, kind in zip(self.bucket.slots, self._kinds, strict=True):
            become(slot.param, kind)

    def rest(self) -> None:
        """Let the parameters tell who reads them, though they have their numbers."""
        for slot, kind in zip(self.bucket.slots, self._freed_kinds, strict=True):
            become(slot.param, kind)

    def keep_written(self) -> None:
        """Write this rank's elements of what a forward leaves in the parameters into the shard.

        A forward may move an average, set a scale by its first samples, or bound a weight. What it
        writes by `param.data.mul_` leaves no trace, so nothing is asked.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index, slot in enumerate(self.bucket.slots):
                is_frozen = not slot.param.requires_grad
                if is_frozen and storage_of(slot.param) != storage_of(self._full):  # param.data =
                    view = self.bucket.views(self._full)[index]
                    view.copy_(slot.param)
                    bind(slot.param, view)
            start = self._axis.rank * self.bucket.shard_numel
            own = self._full[start : min(start + self.bucket.shard_numel, self.bucket.numel)]
            self.shard[: own.numel()].copy_(own)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor [...] lies in the memory that comes and goes."""
        return storage_of(tensor) == storage_of(self._full)

    def free(self) -> None:
        """Give the bytes back; views of the buffer stay."""
        self.rest()
        self._full.untyped_storage().resize_(0)

    def _not_here(self, param: Tensor) -> None:
        """Gather a parameter whose numbers are wanted. Errors: `ModelError` between two steps."""
        self._take(param)
        if isinstance(param, Freed):
            name = next(slot.name for slot in self.bucket.slots if slot.param is param)
            raise ModelError(
                f"the parameter '{name}' {list(param.shape)} is in shards of {self._axis.size} "
                "ranks between two steps, and has no numbers to read or to copy; engine.save(path) "
                "and engine.save_pretrained(path) write all parameters, "
                "engine.local_parameters() has this rank's shards, and under zero2 they stay whole"
            )


class ShardedUnit:
    """The buckets of one unit (trainable, frozen), which are gathered and freed together.

    `prefetch`, `unshard`, `take` and `reshard` are called in one order on all ranks, for they start
    or wait for all-gathers.
    """

    def __init__(self, unit: Unit, index: int, buckets: Sequence[GatheredBucket]) -> None:
        self.unit = unit
        self.index = index
        self.buckets = tuple(buckets)
        self.frozen = bool(unit.frozen)
        self.state = UnitState.SHARDED
        self._made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def note_made(self, tensors: Iterable[Tensor]) -> None:
        """A call of a module of the unit has given these tensors [...]."""
        self._made.update((id(one), one) for one in tensors)

    def has_made(self, tensor: Tensor) -> bool:
        """Whether a call of a module of the unit has given this tensor [...]."""
        return self._made.get(id(tensor)) is tensor

    def prefetch(self) -> None:
        """Start to gather, if that has not begun."""
        if self.state is UnitState.SHARDED:
            for bucket in self.buckets:
                bucket.gather()
            self.state = UnitState.GATHERING

    def unshard(self) -> None:
        """Have the whole parameters. Errors: `ModelError` inside of a transform of torch.func."""
        if self.state in (UnitState.SHARDED, UnitState.GATHERING) and has_function_transforms():
            raise ModelError(
                f"zero3 cannot gather '{self.unit.name}' inside of a transform of torch.func, as "
                "vmap, grad or hessian, which writes into no tensor from outside; take dp or "
                "zero2, under which layers are whole"
            )
        self.prefetch()
        if self.state is UnitState.GATHERING:
            for bucket in self.buckets:
                bucket.wait()
            self.state = UnitState.WHOLE
        if self.state is UnitState.RESTING:
            for bucket in self.buckets:
                bucket.wake()
            self.state = UnitState.WHOLE

    def rest(self) -> None:
        """No call of its modules is under way: whole parameters tell who reads them."""
        if self.state is UnitState.WHOLE:
            for bucket in self.buckets:
                bucket.rest()
            self.state = UnitState.RESTING

    def keep_written(self) -> None:
        """A forward has used the unit: keep what it has written into parameters."""
        if self.state in (UnitState.WHOLE, UnitState.RESTING, UnitState.TAKEN):
            for bucket in self.buckets:
                bucket.keep_written()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor [...] lies in memory that is freed when the unit is not in use.

        A parameter does not count, as it tells who reads it.
        """
        if isinstance(tensor, nn.Parameter) or not has_storage(tensor):
            return False
        return any(bucket.holds(tensor) for bucket in self.buckets)

    def take(self) -> None:
        """Have the whole parameters until `release`."""
        self.unshard()
        self.state = UnitState.TAKEN

    def reshard(self) -> None:
        """Free the whole parameters, but for those that are taken until the step ends."""
        if self.state is UnitState.GATHERING:  # ahead of a use that did not come
            self.unshard()
        if self.state in (UnitState.WHOLE, UnitState.RESTING):
            self._free()

    def release(self) -> None:
        """Free what was taken."""
        if self.state is UnitState.TAKEN:
            self._free()

    def _free(self) -> None:
        for bucket in self.buckets:
            bucket.free()
        self.state = UnitState.SHARDED


class TakenParameters(dict[str, Any]):
    """The parameters of a module, which tells when one is taken.

    Code may do so without a call of the module: a parent may multiply by the weight of a child.
    While torch's compiler looks at code nothing is told, as a graph would serve one unit alone.
    """

    def __init__(self, params: Mapping[str, Any], running: RunningForward) -> None:
        super().__init__(params)
        self.running = running
        self.listeners: list[Callable[[Tensor], None]] = []

    def __getitem__(self, key: str) -> Any:
        param = super().__getitem__(key)
        if param is not None and not torch.compiler.is_compiling():
            for taken in self.listeners:
                taken(param)
        return param


def tell_taken(module: nn.Module, running: RunningForward, taken: Callable[[Tensor], None]) -> None:
    """Have `taken` called with each parameter [...] that code takes from a module.

    Several stages of a rank may ask it of one module; they share `running`. Who asked before, of
    another engine, is no longer told.
    """
    params = module._parameters
    if not isinstance(params, TakenParameters) or params.running is not running:
        params = module._parameters = TakenParameters(params, running)
    params.listeners.append(taken)
