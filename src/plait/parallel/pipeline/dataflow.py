"""The dataflow of a model: the calls of its forward in order, and what each needs of earlier ones.

One run of the forward finds it.

A model is glue around *units*. Units are its blocks and the other modules that have parameters.
Glue is its own Python code: masks, positions, rotary tables, residuals. The forward runs on a small
example, with one unit at a time in memory. Every tensor that the glue makes remembers the units'
results behind it. Nothing is rewritten: stages run this forward.

A unit may also take and leave tensors beside its arguments and what it returns. What it reads
counts, wherever it found it. What it leaves in attributes of its modules are results like others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn, no_grad, zeros
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

from plait.forwards import with_forwards
from plait.held import held_tensors
from plait.parallel.pipeline.side_effects import (
    Attribute,
    Leaves,
    Place,
    attributes_kept,
    changed_values,
    differing,
    is_real_number,
    plain_values,
    tensors_in_attributes,
)
from plait.parallel.pipeline.watch import (
    IN_OBJECT,
    Origins,
    Result,
    UnitWatch,
    with_memory,
)
from plait.random_state import IsolatedRandom
from plait.regions import dissolved, untouched
from plait.torch_internals import has_storage, storage_key
from plait.values import PyTree


@dataclass(frozen=True)
class State:
    """A tensor that code around the units keeps in an attribute from one forward to the next.

    It is written after so many calls, None where it is not, from `results`.
    """

    place: Place
    written_after: int | None
    results: frozenset[Result]


@dataclass(frozen=True)
class Flow:
    """The calls of a forward by the names of their modules; a module may be called more than once.

    `needs[k]` are the results that reach call k through glue alone, `weights[k]` the parameters
    that do. The last entry of both is for the output of the model. Parameters that a call uses
    inside, its own or other modules', may be among `weights[k]`. `written` are the results that
    glue may write into: each stage that runs this glue needs a copy of its own.

    Glue may draw random numbers. `draws[k]` are the draws that reach call k through glue, each as
    the number of calls before it. `drawing` are the calls that draw random numbers themselves.

    `attributes[k]` are those in which call k leaves tensors. `unread` are numbers among these that
    no code of the model reads, though the loss may. `plain[k]` are the attributes in which call k
    leaves plain values, such as the size of an image. `reads[k]` are the attributes around the
    units whose values of the forward before reach call k. `states` are those that a forward writes.
    """

    calls: tuple[str, ...]
    needs: tuple[frozenset[Result], ...]
    weights: tuple[frozenset[str], ...]
    written: frozenset[Result] = frozenset()
    draws: tuple[frozenset[int], ...] = ()
    drawing: frozenset[int] = frozenset()
    attributes: tuple[tuple[Attribute, ...], ...] = ()
    unread: frozenset[Result] = frozenset()
    plain: tuple[tuple[Place, ...], ...] = ()
    reads: tuple[frozenset[Place], ...] = ()
    states: tuple[State, ...] = ()

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

    Parameters of the model itself are its code's, where modules inside have parameters too.
    """
    names = set(blocks)
    whole = {"" for child in model.children() if any(True for _ in child.parameters())}
    units: list[str] = []
    for name, module in model.named_modules():
        if any(name == unit or name.startswith(f"{unit}.") for unit in units):
            continue
        around = any(block.startswith(f"{name}." if name else "") for block in names)
        if name in names or (
            module._parameters
            and name not in whole
            and any(p is not None for p in module._parameters.values())
            and not around
        ):
            units.append(name)
    return units


def discover(model: nn.Module, blocks: Iterable[str], run: Callable[[], object]) -> Flow:
    """The flow of `run()`, which calls the model on an example. Units on the meta device get zeros
    while they run.
    """
    units = {name: model.get_submodule(name) for name in find_units(model, blocks)}
    inside = {part for unit in units.values() for part in unit.modules()}
    around = [(name, part) for name, part in model.named_modules() if part not in inside]
    with attributes_kept(model):
        discovery = _Discovery(model, UnitWatch(model), IsolatedRandom(seed=0))
        with (
            with_forwards([(unit, discovery.observed(name, unit)) for name, unit in units.items()]),
            glue_in_memory(model, units),
            discovery.random,
            no_grad(),
            dissolved(),
            discovery.watch,
        ):
            discovery.watch.mark_states(tensors_in_attributes(around))
            try:
                output = run()
            finally:
                discovery.watch.copies.put_back()
            kept = tensors_in_attributes(around)
    return discovery.flow(output, kept)


class _Discovery:
    """The findings of one forward, call by call."""

    def __init__(self, model: nn.Module, watch: UnitWatch, random: IsolatedRandom) -> None:
        self.watch = watch
        self.random = random
        self._model = model
        self._calls: list[str] = []
        self._needs: list[Origins] = []
        self._drawing: set[int] = set()
        self._attributes: list[tuple[Attribute, ...]] = []
        self._plain: list[tuple[Place, ...]] = []
        self._numbers: set[Result] = set()

    def observed(self, name: str, module: nn.Module) -> Callable[..., object]:
        """The forward of a unit under observation."""
        forward = module.forward
        parts = [
            (f"{name}.{path}" if path else name, part) for path, part in module.named_modules()
        ]

        def call(*args: object, **kwargs: object) -> PyTree:
            if self.watch.inside_unit:
                self.watch.mark_inner_call(module)
                with in_memory(module):
                    return forward(*args, **kwargs)
            number = len(self._calls)
            self._calls.append(name)
            needs = self.watch.of_arguments((args, kwargs))
            self._needs.append(needs)
            drawn = self.random.num_draws
            if any(
                isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))
            ):
                # Code around has sent them where the weights are.
                args, kwargs = tree_map_only(Tensor, with_memory, (args, kwargs))
            with in_memory(module):
                before = tensors_in_attributes(parts)
                values = plain_values(parts)
                with self.watch.unit(module, (args, kwargs), needs):
                    with untouched():
                        output = forward(*args, **kwargs)
                    output = tree_map_only(Tensor, Tensor.clone, output)
                    left = differing(before, tensors_in_attributes(parts))
                    own = self._own_copies(left, len(tree_leaves(output)))
                    left.clear()
                self._plain.append(changed_values(values, plain_values(parts)))
            if self.random.num_draws > drawn:
                self._drawing.add(number)
            self._mark(number, output, own)
            return output

        return call

    def _own_copies(self, left: Iterable[tuple[str, str]], first: int) -> list[Attribute]:
        """Attributes in which a call left tensors, each of which gets memory of its own."""
        found = []
        for owner, name in left:
            count = len(tree_leaves(getattr(self._model.get_submodule(owner), name)))
            attribute = Attribute(owner, name, first, count)
            value = attribute.value(self._model)
            attribute.put(self._model, tree_map_only(Tensor, Tensor.clone, value))
            found.append(attribute)
            first += count
        return found

    def _mark(self, number: int, output: PyTree, attributes: Sequence[Attribute]) -> None:
        leaves = tree_leaves(output)
        results = [(place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        objects = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.watch.mark_results(number, results)
        self.watch.mark_results(number, [(IN_OBJECT, one) for one in held_tensors(objects)])
        held = tree_leaves(output, is_leaf=lambda one: isinstance(one, PackedSequence))
        packed = [one.batch_sizes for one in held if isinstance(one, PackedSequence)]
        self.watch.mark_read(packed)  # torch unpacks by their memory
        for attribute in attributes:
            tensors = tree_leaves(attribute.value(self._model))
            self.watch.mark_results(number, [*zip(attribute.places, tensors, strict=True)])
            self._numbers |= {
                Result(number, place)
                for place, tensor in zip(attribute.places, tensors, strict=True)
                if is_real_number(tensor)
            }
        self._attributes.append(tuple(attributes))

    def flow(self, output: PyTree, kept: Leaves) -> Flow:
        """The flow of the forward that ran. The last stage needs the output of the model, and what
        its code left in attributes, `kept`.

        A loss may read numbers that units left, so the last stage needs them too.
        """
        last = self.watch.of_output(output)
        states = [self._state(place, [one for one, _ in leaves]) for place, leaves in kept.items()]
        for state in states:
            last.add(Origins(set(state.results)))
        needs = [*self._needs, last]
        for state in states:
            for reader in needs:
                if state.place in reader.states:
                    reader.add(Origins(set(state.results)))
        unread = self._numbers.difference(*(one.results for one in needs))
        last.results |= self._numbers
        return Flow(
            tuple(self._calls),
            tuple(frozenset(one.results) for one in needs),
            tuple(frozenset(one.weights) for one in needs),
            frozenset(self.watch.written),
            tuple(frozenset(one.draws) for one in needs),
            frozenset(self._drawing),
            tuple(self._attributes),
            frozenset(unread),
            tuple(self._plain),
            tuple(frozenset(one.states) for one in self._needs),
            tuple(state for state in states if state.written_after is not None),
        )

    def _state(self, place: Place, tensors: Sequence[Tensor]) -> State:
        """The state that code around the units left in an attribute."""
        watch = self.watch
        made = (watch.made_after.get(storage_key(one)) for one in tensors if has_storage(one))
        written = max((after for after in made if after is not None), default=None)
        return State(place, written, frozenset(watch.of_output(tensors).results))


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
        memory = zeros(value.shape, dtype=value.dtype)
        table[key] = (
            nn.Parameter(memory, value.requires_grad) if isinstance(value, nn.Parameter) else memory
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
        table[key] = zeros(value.shape, dtype=value.dtype)
    try:
        yield
    finally:
        for table, key, value in originals:
            table[key] = value
