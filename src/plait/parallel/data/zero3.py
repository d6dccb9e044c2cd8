"""ZeRO-3: parameters, gradients and optimizer state all in shards; a unit is whole only while it is
used.

S. Rajbhandari et al., ZeRO (SC 2020), section 5.3 (P_os+g+p), 3(N-1)/N of the parameters a step.
They are an all-gather before forward, another before backward, and a reduce-scatter.

    forward     gather u0 | gather u1, F u0, free u0 | gather u2, F u1, free u1 | ...
    backward    gather un | gather un-1, B un, reduce and free un | ...

A unit of `[plan] keep_gathered` stays whole from its first forward until the step ends: its
backward and later micro-batches gather nothing. It is FSDP2's `reshard_after_forward=False`.

Here hooks say when a unit is wanted. Its states and their owners of memory are `UnitState`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from plait.held import held_tensors, plain_tensors
from plait.mesh import Shard
from plait.parallel.data.bucket import Bucket
from plait.parallel.data.gather_order import GatherOrder
from plait.parallel.data.gradients import BucketState, Reducer
from plait.parallel.data.sharded_unit import (
    GatheredBucket,
    ShardedUnit,
    UnitState,
    tell_taken,
)
from plait.parallel.data.shards import MasterShards, ShardedGradients
from plait.parallel.data.strategy import (
    DataGroup,
    DataStrategy,
    Replicas,
    make_states,
)
from plait.parallel.data.units import Unit
from plait.torch_internals import in_backward, no_dispatch_modes


class Zero3(DataStrategy):
    """`dpN:zero3`. A rank keeps (shard_numel,) of every bucket; (padded_numel,) is there while its
    unit is used.

    Source: Rajbhandari et al. 2020, section 5.3 (P_os+g+p).
    """

    def __init__(self, units: Sequence[Unit], group: DataGroup) -> None:
        super().__init__(group)
        size = group.shard.size
        trainable = make_states(units, size)
        frozen = make_states(units, size, frozen=True)
        self.states = trainable
        self.frozen_states = frozen
        self._owner: dict[int, ShardedUnit] = {}
        self._gathered = [GatheredBucket(state.bucket, group, self._taken) for state in trainable]
        self._gathered_frozen = [self._frozen_bucket(state.bucket) for state in frozen]
        self._masters = MasterShards(trainable, [bucket.shard for bucket in self._gathered], group)
        self.pieces = self._masters.pieces
        self._order = GatherOrder()
        self.gather_orders = [self._order]
        self._gradients = ShardedGradients(trainable, group, pooled=True, naming=self._order.naming)
        self.reducer = Reducer(trainable, self._gradients.store, self._launch, eager=group.eager)
        self._units = self._make_units(units)
        self._unit_of_bucket = {id(b.bucket): unit for unit in self._units for b in unit.buckets}
        self._backward = False
        self._current: set[ShardedUnit] = set()
        self._running: list[set[ShardedUnit]] = []
        self._forward = False
        self._install_hooks()

    # -- layout
    # ------------------------------------------------------------------------------------------

    def _make_units(self, units: Sequence[Unit]) -> list[ShardedUnit]:
        buckets = defaultdict[str, list[GatheredBucket]](list)
        for bucket in (*self._gathered, *self._gathered_frozen):
            buckets[bucket.bucket.name].append(bucket)
        return [ShardedUnit(unit, index, buckets[unit.name]) for index, unit in enumerate(units)]

    def _frozen_bucket(self, bucket: Bucket) -> GatheredBucket:
        """The memory of a bucket of frozen parameters."""
        return GatheredBucket(bucket, self.group, self._taken)

    def load(self, state: BucketState, index: int, value: Tensor) -> None:
        if any(state is frozen for frozen in self.frozen_states):
            self._gathered_frozen[state.index].load(index, value)
        else:
            self._masters.load(state, index, value)

    # -- the life of a unit
    # ---------------------------------------------------------------------------------------

    def _install_hooks(self) -> None:
        """Gather a unit's parameters, its own or shared with another unit, when one of its modules
        is about to run.
        """
        owner = self._owner
        owner.update((id(param), unit) for unit in self._units for _, param in unit.unit.params)
        for unit in self._units:
            for module in unit.unit.modules:
                used = (id(param) for param in module.parameters(recurse=unit.unit.is_block))
                needed = {owner[param] for param in used if param in owner} | {unit}
                module.register_forward_pre_hook(self._before_forward(unit, needed), prepend=True)
                parts = [*module.modules()] if unit.unit.is_block else [module]
                gather = self._before_backward(unit, needed)
                if module._forward_hooks:  # a stage may send on what they are given
                    module.register_forward_hook(self._on_result(gather), prepend=True)
                module.register_forward_hook(self._after_forward(unit, needed, gather, parts))
                for part in parts:
                    tell_taken(part, self.group.running_forward, self._taken)
            for module in unit.unit.holders:
                tell_taken(module, self.group.running_forward, self._taken)

    def _taken(self, param: Tensor) -> None:
        """Gather a parameter which code takes outside of its module's call.

        Its unit then stays whole until the step ends: no call says when a backward needs it.
        Between two steps nothing is gathered.
        """
        unit = self._owner.get(id(param))
        if unit is None or unit.state is UnitState.TAKEN:
            return
        in_its_call = not self._forward or any(unit in needed for needed in self._running)
        if unit.state is UnitState.WHOLE and in_its_call:
            return
        if in_backward() or self.group.running_forward.is_under_way:
            with no_dispatch_modes():
                unit.take()

    def _before_forward(self, unit: ShardedUnit, needed: set[ShardedUnit]) -> Callable[..., None]:
        def after_backward(grad: Tensor) -> None:
            unit.reshard()

        def hook(module: nn.Module, args: object) -> None:
            if self._backward:
                # A recomputed forward: a block is whole already, a module inside of it may not be.
                # Selective recomputation counts operations, and the first forward had no need to
                # gather.
                with no_dispatch_modes():
                    for other in in_order(needed):
                        other.unshard()
                return
            in_use = needed.union(*self._running)
            for previous in in_order(self._current - in_use):
                previous.keep_written()
                previous.reshard()
            self._current = self._current & in_use | needed
            self._running.append(needed)
            self._order.add(unit.index, unit.unit.name)
            with self._order.naming(f"gathers '{unit.unit.name}'"):
                for other in in_order(needed):
                    if other.unit.keep and torch.is_grad_enabled():
                        other.take()
                    else:
                        other.unshard()
                self._prefetch(unit.index + 1)
            if unit.frozen and unit.unit.is_block:
                # A result of the unit's own call before begins that call's backward.
                inputs = [one for one in _tensors_of(args) if not unit.has_made(one)]
                _on_gradient(inputs, after_backward)

        return hook

    def _before_backward(
        self, unit: ShardedUnit, needed: set[ShardedUnit]
    ) -> Callable[[Tensor], None]:
        def before_backward(grad: Tensor) -> None:
            # A gradient that a forward or a loss takes has a backward of its own, and no hook.
            inside = self.group.running_forward.is_under_way
            with self._order.naming(f"gathers '{unit.unit.name}'"):
                for other in in_order(needed):
                    if inside:
                        other.take()
                    else:
                        other.unshard()
                if not inside:
                    self._prefetch(unit.index - 1)

        return before_backward

    def _on_result(self, before_backward: Callable[[Tensor], None]) -> Callable[..., None]:
        """A hook before those of users, which may return another tensor."""

        def hook(module: nn.Module, args: object, output: object) -> None:
            if not self._backward:
                _on_gradient(output, before_backward)

        return hook

    def _after_forward(
        self,
        unit: ShardedUnit,
        needed: set[ShardedUnit],
        before_backward: Callable[[Tensor], None],
        parts: Sequence[nn.Module],
    ) -> Callable[..., object]:
        def hook(module: nn.Module, args: object, output: object) -> object:
            output = _outliving(output, needed)
            hidden = [*held_tensors(output), *_left_in(parts)]
            for other in in_order(needed):
                if any(other.holds(tensor) for tensor in hidden):
                    other.take()
            if not self._backward:
                self._running.pop()
                unit.note_made(_tensors_of(output))
                if not _on_gradient(output, before_backward) and _hides_tensors(output):
                    for other in in_order(needed):
                        other.take()
                for other in needed.difference(*self._running):
                    other.rest()
            return output

        return hook

    def _prefetch(self, index: int) -> None:
        if 0 <= index < len(self._units):
            self._units[index].prefetch()

    def _launch(self, state: BucketState) -> None:
        self._gradients.launch(state)
        unit = self._unit_of_bucket[id(state.bucket)]
        if not unit.frozen:  # frozen ones may still be wanted for the gradient of the unit's input
            unit.reshard()

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def _release(self) -> None:
        for unit in self._units:
            unit.release()

    # -- the moments of a step
    # ------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._order.clear()
        self._release()
        self._masters.unbind_gradients(self._gradients.lent)
        self._gradients.begin_step()
        super().begin_step()

    def before_forward(self) -> None:
        if not torch.is_grad_enabled():
            self._release()  # a loss of the evaluation before may have taken parameters
        self._backward = False
        self._forward = True
        self.group.running_forward.begin()
        self._running.clear()
        self._prefetch(0)

    def after_forward(self) -> None:
        self._forward = False
        self.group.running_forward.end()
        self._keep_running()
        for unit in self._units:
            unit.keep_written()
        if not torch.is_grad_enabled():
            self._release()
        self._reshard()
        self._current = set()
        self._backward = True

    def _keep_running(self) -> None:
        """Take the units of modules whose forward ended with the stage, before it returned.

        No output of theirs tells when a backward needs them.
        """
        for needed in self._running:
            for unit in in_order(needed):
                unit.take()
        self._running.clear()

    def after_backward(self, *, weight_grads: bool = True) -> None:
        super().after_backward(weight_grads=weight_grads)
        self._reshard()

    def reduce(self) -> None:
        self.reducer.end_step()
        self._gradients.finish()
        self._masters.bind_gradients(self._gradients.shards)

    def publish(self) -> None:
        self._release()
        self._reshard()  # another stage of this rank may run a module too, and gather its unit
        self._masters.publish()

    @property
    def replicas(self) -> Replicas:
        return Replicas(self.group.replicate.size, self.group.replicate.rank)

    def frozen_shards(self, *, trained: bool = False) -> list[Shard]:
        buckets = (*(self._gathered if trained else ()), *self._gathered_frozen)
        return [shard for bucket in buckets for shard in bucket.shards()]

    def live_tensors(self) -> dict[str, list[Tensor]]:
        shards = [bucket.shard for bucket in (*self._gathered, *self._gathered_frozen)]
        return {
            "parameters": shards,
            "optimizer": self._masters.owned,
            **self._gradients.live_tensors(),
        }


def in_order(units: Iterable[ShardedUnit]) -> list[ShardedUnit]:
    """One order on every rank: gathers are collective, and a set has another order in each
    process.
    """
    return sorted(units, key=lambda unit: unit.index)


def _outliving(output: object, units: Iterable[ShardedUnit]) -> object:
    """An output whose views of parameters are copies: a reader comes when the unit may be freed.

    Such is a table of positions, `weight[:length]`, which later layers and their backward read.
    Views without a gradient stay, as code may write into them.
    """

    def is_copied(leaf: Tensor) -> bool:
        return leaf.requires_grad and any(unit.holds(leaf) for unit in units)

    if not any(map(is_copied, _tensors_of(output))):
        return output
    return tree_map_only(Tensor, lambda leaf: leaf.clone() if is_copied(leaf) else leaf, output)


def _left_in(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The tensors [...] that attributes of modules hold, as of a forward that keeps one."""
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, (Tensor, list, tuple)):
                yield from plain_tensors(value)


def _hides_tensors(output: object) -> bool:
    """Whether an output may hold tensors inside objects, of whose gradients nothing tells."""
    plain = (Tensor, int, float, complex, str, bytes, type(None))
    are_plain = (isinstance(leaf, plain) for leaf in tree_leaves(output))
    return torch.is_grad_enabled() and not all(are_plain)


def _tensors_of(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _on_gradient(values: object, hook: Callable[[Tensor], None]) -> bool:
    """Call `hook` when the gradient of a tensor among `values` has been computed.

    Returns whether there is such a tensor.
    """
    tensors = [tensor for tensor in _tensors_of(values) if tensor.requires_grad]
    for tensor in tensors:
        tensor.register_hook(hook)
        if tensor._base is not None and tensor._base.grad_fn is not None:
            _on_gradient_of_view(tensor, tensor._base, hook)
    return bool(tensors)


def _on_gradient_of_view(view: Tensor, base: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` at the gradient of `base` if none of `view` comes.

    A write into the view, as `y = block(x); y *= 0.5`, takes it out of the graph with its hooks.
    A linear layer's result [B, T, D] is a view of one product.
    """
    came = False

    def of_view(grad: Tensor) -> None:
        nonlocal came
        came = True

    def of_base(grad: Tensor) -> None:
        if not came:
            hook(grad)

    view.register_hook(of_view)
    base.register_hook(of_base)
