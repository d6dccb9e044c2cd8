"""A watch over one forward: which results of its units stand behind a tensor.

The glue of a model is followed operation by operation. A unit is one operation. But what it reads
beside its arguments is noted, and so is what it leaves beside its results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from plait.held import held_tensors, plain_tensors
from plait.parallel.pipeline.kept_parameters import (
    ParameterCopies,
    tensors_of,
    written_tensors,
)
from plait.parallel.pipeline.side_effects import Leaves, Place
from plait.torch_internals import has_storage, storage_key
from plait.values import PyTree

IN_OBJECT = -1
"""The number of a tensor inside an object that a call returns. Such tensors have no place."""

UNRETURNED = -2
"""The number of a tensor that a call leaves outside its result, such as in a list that it got.
Such tensors have no place either.
"""


@dataclass(frozen=True, order=True)
class Result:
    """Tensor number `leaf` of what call number `call` makes, or `IN_OBJECT`, or `UNRETURNED`."""

    call: int
    leaf: int


@dataclass
class Origins:
    """The origins of a tensor: results of units, parameters of the glue, and its draws.

    `states` are attributes around the units, with the values that they had before the forward.
    """

    results: set[Result] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    draws: set[int] = field(default_factory=set)
    states: set[Place] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.results or self.weights or self.draws or self.states)

    def add(self, other: Origins) -> None:
        """Let the other's stand behind it too."""
        self.results |= other.results
        self.weights |= other.weights
        self.draws |= other.draws
        self.states |= other.states


_OF_SHAPES = frozenset(
    {
        torch.ops.aten.empty_like,
        torch.ops.aten.full_like,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
        torch.ops.aten.new_full,
        torch.ops.aten.new_ones,
        torch.ops.aten.new_zeros,
        torch.ops.aten.ones_like,
        torch.ops.aten.zeros_like,
    }
)
"""The operations that take of a tensor its shape, its dtype and its device alone."""


@dataclass
class _RunningUnit:
    """A unit at work: what it reads, and the memory that depends on what it got.

    `made` is held while the unit runs, as an address names memory only while that lives. `fresh`
    is memory of constants that it made.
    """

    number: int
    needs: Origins
    got: set[int]
    made: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)

    def note(self, tensors: Sequence[Tensor], given: Sequence[Tensor], *, depends: bool) -> None:
        """An operation on `given` [...] made or wrote `tensors` [...]."""
        old = {storage_key(tensor) for tensor in given}
        for tensor in tensors:
            key = storage_key(tensor)
            if depends and key not in self.got:
                self.got.add(key)
                self.made[key] = tensor.untyped_storage()
            elif not depends and key not in old:
                self.fresh.add(key)


class UnitWatch(TorchDispatchMode):
    """Follows origins through the operations of the glue, by memory, so that views and writes in
    place count too.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._name_of = {id(param): name for name, param in model.named_parameters()}
        self._origins: dict[int, Origins] = {}
        self._left: dict[int, set[Result]] = {}
        self._returned: set[int] = set()
        self._alive: list[object] = []  # addresses are names here, so nothing may be freed
        self._running: _RunningUnit | None = None
        self._read: set[Result] = set()
        self.copies = ParameterCopies(model)
        self.num_calls = 0
        self.written: set[Result] = set()
        self.made_after: dict[int, int] = {}

    @property
    def inside_unit(self) -> bool:
        """Whether a unit is at work."""
        return self._running is not None

    def of(self, values: PyTree) -> Origins:
        """The origins of the tensors of values."""
        found = Origins()
        for tensor in held_tensors(values):
            found.add(self._of_tensor(tensor))
        return found

    def of_arguments(self, values: PyTree) -> Origins:
        """The origins of what a unit gets, with what Python has read as numbers until now.

        Such a number may decide on anything that follows.
        """
        found = self.of(values)
        found.results |= self._read
        return found

    def of_output(self, values: PyTree) -> Origins:
        """The origins of what a model returns, with what units left in its lists."""
        found = self.of_arguments(values)
        found.results |= self._left_in([one for one in plain_tensors(values) if has_storage(one)])
        return found

    def _of_tensor(self, tensor: Tensor) -> Origins:
        name = self._name_of.get(id(tensor))
        if name is not None:
            return Origins(weights={name})
        return self._origins.get(storage_key(tensor), Origins())

    @contextmanager
    def unit(self, module: nn.Module, given: PyTree, needs: Origins) -> Iterator[None]:
        """The call of a unit, which is one operation here: nothing inside is followed.

        `needs` gains what it reads beside the arguments `given`.
        """
        number = self.num_calls
        self.num_calls += 1
        tensors = [*held_tensors(given), *module.parameters()]
        got = {storage_key(tensor) for tensor in tensors if has_storage(tensor)}
        self._running = unit = _RunningUnit(number, needs, got)
        try:
            yield
        finally:
            self._running = None
        made = {key: StorageWeakRef(storage) for key, storage in unit.made.items()}
        unit.made.clear()
        for key, storage in made.items():
            if not storage.expired():
                self._alive.append(storage)
                self._left[key] = {Result(number, UNRETURNED)}

    def mark_inner_call(self, module: nn.Module) -> None:
        """The unit at work calls a module that is outside of it, and uses its parameters."""
        assert self._running is not None
        self._note_weights(self._running, [*module.parameters()])

    def mark_states(self, attributes: Leaves) -> None:
        """The tensors of attributes around the units have their values of before."""
        for place, leaves in attributes.items():
            for tensor, _ in leaves:
                if has_storage(tensor):
                    self._mark(tensor, Origins(states={place}))

    def mark_results(self, number: int, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Tensors [...] are results of call `number`, by their places. Each has its own memory."""
        for place, tensor in tensors:
            if has_storage(tensor):
                self._mark(tensor, Origins({Result(number, place)}))
                self._returned.add(storage_key(tensor))
                self._left.pop(storage_key(tensor), None)

    def mark_read(self, tensors: Sequence[Tensor]) -> None:
        """Code around the units reads these tensors [...] where no operation shows it."""
        for tensor in tensors:
            self._read |= self._of_tensor(tensor).results

    def _mark(self, tensor: Tensor, origins: Origins) -> None:
        storage = tensor.untyped_storage() if has_storage(tensor) else None
        self._alive.append((tensor, storage))
        self._origins.setdefault(storage_key(tensor), Origins()).add(origins)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        kwargs = kwargs or {}
        self.copies.before(written_tensors(func, args, kwargs))
        if self._running is not None:
            return self._in_unit(self._running, func, args, kwargs)
        origins = self.of((args, kwargs))
        origins.results |= self._left_in(tensors_of((args, kwargs)))
        if func._schema.is_mutable:
            self.written |= origins.results
        if torch.Tag.nondeterministic_seeded in func.tags:
            origins.draws.add(self.num_calls)
        args, kwargs = tree_map_only(Tensor, with_memory, (args, kwargs))
        output = func(*args, **kwargs)
        if not tensors_of(output) and not func._schema.is_mutable:
            self._read |= origins.results
        if origins:
            viewed = {storage_key(one) for one in tensors_of((args, kwargs))}
            viewed -= {storage_key(one) for one in written_tensors(func, args, kwargs)}
            for leaf in tensors_of(output):
                self._mark(leaf, origins)
                if storage_key(leaf) not in viewed:
                    self.made_after[storage_key(leaf)] = self.num_calls
        return output

    def _in_unit(
        self, unit: _RunningUnit, func: OpOverload, args: PyTree, kwargs: PyTree
    ) -> PyTree:
        given_tensors = tensors_of((args, kwargs))
        written = [*written_tensors(func, args, kwargs)]
        self._note_reads(unit, given_tensors, written)
        if func.overloadpacket not in _OF_SHAPES:
            self._note_weights(unit, given_tensors)
        depends = torch.Tag.nondeterministic_seeded in func.tags or (
            func.overloadpacket not in _OF_SHAPES
            and any(storage_key(tensor) in unit.got for tensor in given_tensors)
        )
        output = func(*args, **kwargs)
        for tensor in written:
            key = storage_key(tensor)
            self.written |= self._origins.get(key, Origins()).results
            if key in unit.fresh and depends:
                unit.note([tensor], given_tensors, depends=True)
            elif key not in unit.fresh and key not in unit.made and key not in self._returned:
                self._alive.append(tensor.untyped_storage())
                # A later read gets the sum of all writes, as of a counter or of statistics.
                self._left.setdefault(key, set()).add(Result(unit.number, UNRETURNED))
        unit.note(tensors_of(output), given_tensors, depends=depends)
        return output

    def _note_reads(
        self, unit: _RunningUnit, given: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        """An operation of a unit reads the tensors `given` [...], but for those that it writes."""
        only_written = {id(tensor) for tensor in written}
        read = [tensor for tensor in given if id(tensor) not in only_written]
        for tensor in read:
            known = self._origins.get(storage_key(tensor))
            if known is not None:
                unit.needs.add(known)
        unit.needs.results |= self._left_in(read)

    def _note_weights(self, unit: _RunningUnit, given: Sequence[Tensor]) -> None:
        """A unit uses these parameters [...], its own or those of other modules."""
        names = (self._name_of.get(id(tensor)) for tensor in given)
        unit.needs.weights.update(name for name in names if name is not None)

    def _left_in(self, tensors: Sequence[Tensor]) -> set[Result]:
        """The results that units left in these tensors [...]."""
        if not self._left:
            return set()
        none: set[Result] = set()
        return none.union(*(self._left.get(storage_key(tensor), none) for tensor in tensors))


def with_memory(tensor: Tensor) -> Tensor:
    """The tensor [...], or zeros of its shape and dtype where it is on the meta device."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
