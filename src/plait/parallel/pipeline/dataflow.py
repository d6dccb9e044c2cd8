"""The dataflow of a model: the calls of its forward in order, and what each needs of earlier ones.

One run of the forward finds it.

A model is glue around *units*. Units are its blocks and the other modules that have parameters.
Glue is its own Python code: masks, positions, rotary tables, residuals. The forward runs on a small
example, with one unit at a time in memory. Every tensor that the glue makes remembers the units'
results behind it. Nothing is rewritten: stages run this forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from plait.random_state import IsolatedRandom
from plait.regions import dissolved, untouched
from plait.torch_internals import storage_key
from plait.values import PyTree

IN_OBJECT = -1
"""The number of a tensor inside an object that a call returns. Such tensors have no place."""


@dataclass(frozen=True, order=True)
class Result:
    """Tensor number `leaf` of what call number `call` returns, or `IN_OBJECT`."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Flow:
    """The calls of a forward by the names of their modules; a module may be called more than once.

    `needs[k]` are the results that reach call k through glue alone, `weights[k]` the parameters
    that do. The last entry of both is for the output of the model. `written` are the results that
    glue may write into: each stage that runs this glue needs a copy of its own.

    Glue may draw random numbers. `draws[k]` are the draws that reach call k through glue, each as
    the number of calls before it. `drawing` are the calls that draw random numbers themselves.
    """

    calls: tuple[str, ...]
    needs: tuple[frozenset[Result], ...]
    weights: tuple[frozenset[str], ...]
    written: frozenset[Result] = frozenset()
    draws: tuple[frozenset[int], ...] = ()
    drawing: frozenset[int] = frozenset()

    def crossing(self, stage_of: Sequence[int], boundary: int) -> tuple[Result, ...]:
        """The results that pass from stage `boundary` to the next.

        They are made up to there, and needed by any later stage.
        """
        last = max(stage_of)
        needed_results = {
            result
            for call, results in enumerate(self.needs)
            for result in results
            if (stage_of[call] if call < len(stage_of) else last)
            > boundary
            >= stage_of[result.call]
        }
        return tuple(sorted(needed_results))


def find_units(model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Names of the blocks and of the outermost other modules with parameters of their own that hold
    no block.
    """
    names = set(blocks)
    units: list[str] = []
    for name, module in model.named_modules():
        if any(name == unit or name.startswith(f"{unit}.") for unit in units):
            continue
        around = any(block.startswith(f"{name}." if name else "") for block in names)
        if name in names or (
            module._parameters
            and any(p is not None for p in module._parameters.values())
            and not around
        ):
            units.append(name)
    return units


@dataclass
class _Origins:
    results: set[Result] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    draws: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.results or self.weights or self.draws)

    def add(self, other: _Origins) -> None:
        self.results |= other.results
        self.weights |= other.weights
        self.draws |= other.draws


class _UnitWatch(TorchDispatchMode):
    """Follows origins through the operations of the glue, by memory, so that views and writes in
    place count too.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._name_of = {id(param): name for name, param in model.named_parameters()}
        self._origins: dict[int, _Origins] = {}
        self._alive: list[object] = []  # addresses are names here, so nothing may be freed
        self.inside_unit = False
        self.num_calls = 0
        self.written: set[Result] = set()

    def of(self, values: PyTree) -> _Origins:
        found = _Origins()
        for tensor in _tensors(values):
            found.add(self._of_tensor(tensor))
        return found

    def _of_tensor(self, tensor: Tensor) -> _Origins:
        name = self._name_of.get(id(tensor))
        if name is not None:
            return _Origins(weights={name})
        return self._origins.get(storage_key(tensor), _Origins())

    @contextmanager
    def unit(self, number: int) -> Iterator[None]:
        """The call of a unit, which is one operation here: nothing inside is followed."""
        self.num_calls = number
        self.inside_unit = True
        try:
            yield
        finally:
            self.inside_unit = False

    def mark(self, tensor: Tensor, origins: _Origins) -> None:
        storage = tensor.untyped_storage()
        self._alive.append((tensor, storage))
        self._origins.setdefault(storage_key(tensor), _Origins()).add(origins)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        kwargs = kwargs or {}
        if self.inside_unit:
            return func(*args, **kwargs)
        origins = self.of((args, kwargs))
        if func._schema.is_mutable:
            self.written |= origins.results
        if torch.Tag.nondeterministic_seeded in func.tags:
            origins.draws.add(self.num_calls)
        args, kwargs = tree_map_only(Tensor, _with_memory, (args, kwargs))
        output = func(*args, **kwargs)
        if origins:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    self.mark(leaf, origins)
        return output


def _tensors(values: PyTree) -> Iterator[Tensor]:
    """The tensors of values, and of objects among them, such as a cache of keys."""
    seen: set[int] = set()
    left = tree_leaves(values)
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            yield one
        elif id(one) not in seen and not isinstance(one, (type, ModuleType, nn.Module)):
            seen.add(id(one))
            left.extend(_held_by(one))


def _held_by(value: object) -> Iterator[object]:
    """The objects that an object holds: attributes, items, and what a function is bound to."""
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from (getattr(value, name) for name in names if hasattr(value, name))
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _with_memory(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor


def discover(model: nn.Module, blocks: Iterable[str], run: Callable[[], object]) -> Flow:
    """The flow of `run()`, which calls the model on an example. Units on the meta device get zeros
    while they run.
    """
    watch = _UnitWatch(model)
    calls: list[str] = []
    needs: list[_Origins] = []
    drawing: set[int] = set()
    random = IsolatedRandom(seed=0)

    def observed(name: str, module: nn.Module) -> Callable[..., object]:
        forward = module.forward

        def call(*args: object, **kwargs: object) -> PyTree:
            if watch.inside_unit:
                return forward(*args, **kwargs)
            number = len(calls)
            calls.append(name)
            needs.append(watch.of((args, kwargs)))
            drawn = random.num_draws
            # Code around may have sent them where the weights are: to the meta device.
            args, kwargs = tree_map_only(Tensor, _with_memory, (args, kwargs))
            with watch.unit(len(calls)):
                with in_memory(module), untouched():
                    output = forward(*args, **kwargs)
                output = tree_map(
                    lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, output
                )
            if random.num_draws > drawn:
                drawing.add(number)
            leaves = tree_leaves(output)
            for leaf, value in enumerate(leaves):
                if isinstance(value, Tensor):
                    watch.mark(value, _Origins({Result(number, leaf)}))
            for tensor in _tensors([leaf for leaf in leaves if not isinstance(leaf, Tensor)]):
                watch.mark(tensor, _Origins({Result(number, IN_OBJECT)}))
            return output

        return call

    units = {name: model.get_submodule(name) for name in find_units(model, blocks)}
    with (
        replaced(units, observed),
        glue_in_memory(model, units),
        random,
        torch.no_grad(),
        dissolved(),
        watch,
    ):
        output = run()
    needs.append(watch.of(output))
    return Flow(
        tuple(calls),
        tuple(frozenset(one.results) for one in needs),
        tuple(frozenset(one.weights) for one in needs),
        frozenset(watch.written),
        tuple(frozenset(one.draws) for one in needs),
        frozenset(drawing),
    )


@contextmanager
def replaced(
    units: dict[str, nn.Module], wrap: Callable[[str, nn.Module], Callable[..., PyTree]]
) -> Iterator[None]:
    """`wrap(name, module)` as the forward of each unit, for a while."""
    before: dict[str, Any] = {name: vars(module).get("forward") for name, module in units.items()}
    for name, module in units.items():
        module.forward = wrap(name, module)
    try:
        yield
    finally:
        for name, module in units.items():
            if before[name] is None:
                del module.forward
            else:
                module.forward = before[name]


@contextmanager
def in_memory(module: nn.Module) -> Iterator[None]:
    """Zeros for the meta parameters and buffers of a module and all inside it, for a while."""
    tables: list[PyTree] = [
        table for part in module.modules() for table in (part._buffers, part._parameters)
    ]
    originals = [
        (table, key, value)
        for table in tables
        for key, value in table.items()
        if value is not None and value.is_meta
    ]
    for table, key, value in originals:
        zeros = torch.zeros(value.shape, dtype=value.dtype)
        table[key] = (
            nn.Parameter(zeros, value.requires_grad) if isinstance(value, nn.Parameter) else zeros
        )
    try:
        yield
    finally:
        for table, key, value in originals:
            table[key] = value


@contextmanager
def glue_in_memory(model: nn.Module, units: dict[str, nn.Module]) -> Iterator[None]:
    """Zeros for the meta buffers outside the units."""
    inside = {part for unit in units.values() for part in unit.modules()}
    originals = [
        (part._buffers, key, value)
        for part in model.modules()
        if part not in inside
        for key, value in part._buffers.items()
        if value is not None and value.is_meta
    ]
    for table, key, value in originals:
        table[key] = torch.zeros(value.shape, dtype=value.dtype)
    try:
        yield
    finally:
        for table, key, value in originals:
            table[key] = value
