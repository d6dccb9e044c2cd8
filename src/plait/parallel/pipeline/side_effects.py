"""Tensors that a forward leaves in attributes of modules, such as the loss of a router.

Code around a block may read them, as `sum(block.aux for block in self.blocks)` does. So a pipeline
carries them between its stages, like results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.errors import ModelError
from plait.parallel.pipeline.payload import Payload
from plait.values import PyTree

_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes by which torch keeps what a module consists of."""

Leaves = dict[tuple[str, str], list[Tensor]]
"""Tensors by the path of a module and the name of its attribute."""


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
    def places(self) -> range:
        """The numbers of its tensors among the results of the call."""
        return range(self.first, self.first + self.count)

    def value(self, model: nn.Module) -> PyTree:
        """The value that the attribute holds now."""
        return getattr(model.get_submodule(self.owner), self.name, None)

    def put(self, model: nn.Module, value: PyTree) -> None:
        """Let the attribute hold a value: a tensor [...], or a list or a dictionary of them."""
        setattr(model.get_submodule(self.owner), self.name, value)

    def leave_out(self, model: nn.Module) -> None:
        """Let who reads the attribute get an error. A buffer keeps its tensor."""
        if self.name not in model.get_submodule(self.owner)._buffers:
            self.put(model, Elsewhere(self))


def tensors_in_attributes(modules: Iterable[tuple[str, nn.Module]]) -> Leaves:
    """The tensors of all attributes of modules that hold nothing but tensors, buffers included."""
    found: Leaves = {}
    for path, module in modules:
        own = ((name, value) for name, value in vars(module).items() if name not in _OF_MODULES)
        for name, value in chain(own, module._buffers.items()):
            if isinstance(value, (Tensor, list, tuple, dict)):
                leaves = tree_leaves(value)
                if leaves and all(isinstance(leaf, Tensor) for leaf in leaves):
                    found[path, name] = leaves
    return found


def differing(before: Leaves, after: Leaves) -> Leaves:
    """The attributes of `after` whose tensors are others than before."""
    return {
        place: leaves
        for place, leaves in after.items()
        if [*map(id, leaves)] != [*map(id, before.get(place, ()))]
    }


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow"),
    *("matmul", "rmatmul", "neg", "abs", "lt", "le", "gt", "ge", "bool", "float", "int", "len"),
    *("iter", "getitem"),
)


class Elsewhere:
    """An attribute whose tensors are on another stage. Who reads it gets an error."""

    def __init__(self, attribute: Attribute) -> None:
        self._place = (attribute.owner, attribute.name)

    def _refuse(self, *_: object) -> NoReturn:
        owner, name = self._place
        raise ModelError(
            f"the attribute '{name}' of '{owner}' is read on a rank of pp that does not run "
            f"'{owner}'; return its tensors from the model's forward with the output"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> NoReturn:
        """Refuse to be an argument of a function of torch."""
        next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))._refuse()


for _operator in _OPERATORS:
    setattr(Elsewhere, f"__{_operator}__", Elsewhere._refuse)


class LinkAttributes:
    """Attributes in which the links of a chain leave tensors, which no other stage gets.

    The first payload names those of earlier stages. `links` are those of the stage, and `here`
    those of all stages of this rank.
    """

    def __init__(self, model: nn.Module, links: Iterable[str], here: Iterable[str]) -> None:
        self._model = model
        self._parts = _parts_of(model, links)
        self._here = {path for path, _ in _parts_of(model, here)}
        self._earlier: tuple[Attribute, ...] = ()
        self._known: tuple[Attribute, ...] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The first forward of the links inside shows what they leave."""
        if self._known is not None:
            yield
            return
        before = tensors_in_attributes(self._parts)
        yield
        left = differing(before, tensors_in_attributes(self._parts))
        own = (Attribute(*place, 0, len(leaves)) for place, leaves in left.items())
        self._known = (*self._earlier, *own)

    def told(self, payload: Payload) -> Payload:
        """The payload for the next stage, which names them."""
        payload.note = (payload.note, self._known)
        return payload

    def heard(self, payload: Payload) -> Payload:
        """The payload of the stage before without the names. Who reads such a one gets an error."""
        note, left = payload.note
        if self._known is None:
            self._earlier = left
            for attribute in left:
                if attribute.owner not in self._here:
                    attribute.leave_out(self._model)
        return replace(payload, note=note)


def _parts_of(model: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
    return [part for name in names for part in model.get_submodule(name).named_modules(prefix=name)]


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Leave the attributes of all modules as they were, whatever a forward puts there."""
    tables = [table for module in model.modules() for table in (vars(module), module._buffers)]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, values in zip(tables, before, strict=True):
            for name in [name for name in table if name not in values]:
                del table[name]
            table.update(values)


def is_real_number(tensor: Tensor) -> bool:
    """Whether a tensor [...] is a single real number, without dims."""
    return not tensor.dim() and torch.is_floating_point(tensor)
