"""Tensors that a forward leaves in attributes of modules, such as the loss of a router.

Code around a block may read them, as `sum(block.aux for block in self.blocks)` does. So a pipeline
carries them between its stages, like results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.held import TableEntries, is_table
from plait.values import PyTree

_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes by which torch keeps what a module consists of."""

Place = tuple[str, str]
"""The path of a module and the name of its attribute."""

Leaves = dict[Place, list[tuple[Tensor, int]]]
"""The tensors of attributes, each with the number of writes to it so far."""


@dataclass(frozen=True)
class Attribute:
    """An attribute in which a call leaves tensors: one, or a list or a dictionary of them.

    `owner` is the path of its module in the model. As results of the call they are `count` in
    number, from `first` on.
    """

    owner: str
    name: str
    first: int
    count: int

    @property
    def place(self) -> Place:
        """The path of the module and the name."""
        return self.owner, self.name

    @property
    def places(self) -> range:
        """The numbers of its tensors among the results of the call."""
        return range(self.first, self.first + self.count)

    def value(self, model: nn.Module) -> PyTree:
        """The value that the attribute holds now."""
        return value_at(model, self.place)

    def put(self, model: nn.Module, value: PyTree) -> None:
        """Let the attribute hold a value: a tensor [...], or a list or a dictionary of them."""
        setattr(model.get_submodule(self.owner), self.name, value)


def value_at(model: nn.Module, place: Place) -> object:
    """The value of an attribute, None where there is none."""
    owner, name = place
    return getattr(model.get_submodule(owner), name, None)


def number_of(value: PyTree, device: torch.device) -> PyTree:
    """A number as a tensor [...] of its own memory; anything else as it is."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64, device=device)
    return value


def tensors_in_attributes(modules: Iterable[tuple[str, nn.Module]]) -> Leaves:
    """The tensors of all attributes of modules that hold nothing but tensors, buffers included."""
    found: Leaves = {}
    for path, module in modules:
        own = ((name, value) for name, value in vars(module).items() if name not in _OF_MODULES)
        for name, value in chain(own, module._buffers.items()):
            if isinstance(value, Tensor) or (isinstance(value, (list, tuple, dict)) and value):
                leaves: list[PyTree] = tree_leaves(value)
                if leaves and all(isinstance(leaf, Tensor) for leaf in leaves):
                    found[path, name] = [(leaf, _num_writes(leaf)) for leaf in leaves]
    return found


def _num_writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def differing(before: Leaves, after: Leaves) -> dict[Place, list[Tensor]]:
    """The attributes of `after` whose tensors [...] are others than before, or numbers with other
    values.
    """
    differ = {}
    for place, leaves in after.items():
        if _names(leaves) != _names(before.get(place, ())):
            differ[place] = [tensor for tensor, _ in leaves]
    return differ


def _names(leaves: Iterable[tuple[Tensor, int]]) -> list[tuple[int, int]]:
    """The names of tensors. A number has another name after a write."""
    return [(id(leaf), writes if is_real_number(leaf) else 0) for leaf, writes in leaves]


def plain_values(modules: Iterable[tuple[str, nn.Module]]) -> dict[Place, object]:
    """The plain values in attributes of modules: whole numbers, text, and tuples of them."""
    return {
        (path, name): value
        for path, module in modules
        for name, value in vars(module).items()
        if _is_plain(value)
    }


def _is_plain(value: PyTree) -> bool:
    if type(value) in (tuple, torch.Size):
        return all(map(_is_plain, value))
    return type(value) in (int, bool, str)


def changed_values(
    before: Mapping[Place, object], after: Mapping[Place, object]
) -> tuple[Place, ...]:
    """The places whose value is another than before."""
    absent = object()
    return tuple(place for place, value in after.items() if before.get(place, absent) != value)


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Leave the attributes of all modules as they were, whatever a forward puts there.

    Lists, queues and dictionaries get their entries back. Hooks are such entries: a forward may
    register them once and note that in an attribute.
    """
    tables = [table for module in model.modules() for table in (vars(module), module._buffers)]
    inside = [one for table in tables for one in table.values() if is_table(one)]
    kept = TableEntries([*tables, *inside])
    try:
        yield
    finally:
        kept.put_back()


def is_real_number(tensor: Tensor) -> bool:
    """Whether a tensor [...] is a single real number, without dims."""
    return not tensor.dim() and torch.is_floating_point(tensor)
