"""Attributes whose tensors are on another stage: a read of them is an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from torch import nn
from torch.utils._pytree import tree_leaves

from plait.errors import ModelError
from plait.parallel.pipeline.payload import Payload
from plait.parallel.pipeline.side_effects import Attribute, differing, tensors_in_attributes
from plait.values import PyTree

_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow"),
    *("matmul", "rmatmul", "neg", "abs", "lt", "le", "gt", "ge", "bool", "float", "int", "len"),
    *("iter", "getitem"),
)


class Elsewhere:
    """The value of an attribute whose tensors are on another stage. A read of it is an error.

    `before` is the value that it replaces, by the attribute's name; empty if there was none.
    """

    def __init__(self, attribute: Attribute, before: Mapping[str, object]) -> None:
        self._place = (attribute.owner, attribute.name)
        self._before = before

    def take_back(self, module: nn.Module) -> None:
        """Give the attribute of the module its value of before."""
        del vars(module)[self._place[1]]
        vars(module).update(self._before)

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


def leave_out(attribute: Attribute, model: nn.Module) -> None:
    """Make a read of an attribute an error.

    A buffer keeps its tensor. Modules of plait read their attributes on every stage themselves.
    """
    module = model.get_submodule(attribute.owner)
    if attribute.name not in module._buffers and not type(module).__module__.startswith("plait."):
        before = {key: value for key, value in vars(module).items() if key == attribute.name}
        attribute.put(model, Elsewhere(attribute, before))


def take_back(model: nn.Module) -> None:
    """Give the attributes that `leave_out` has replaced their values of before."""
    for module in model.modules():
        for value in [*vars(module).values()]:
            if isinstance(value, Elsewhere):
                value.take_back(module)


class LinkAttributes:
    """Attributes in which the links of a chain leave tensors, which no other stage gets.

    The first payload names those of earlier stages. `links` are those of the stage, and `here`
    those of all stages of this rank.
    """

    def __init__(self, model: nn.Module, links: Iterable[str], here: Iterable[str]) -> None:
        self._model = model
        self._parts = _parts_of(model, links)
        self._here = {module for _, module in _parts_of(model, here)}  # blocks may share one
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

    def add_names(self, payload: Payload) -> Payload:
        """The payload for the next stage, with the names of these attributes."""
        payload.note = (payload.note, self._known)
        return payload

    def take_names(self, payload: Payload) -> Payload:
        """The payload of the stage before, without the names. A read of these becomes an error."""
        note, left = payload.note
        if self._known is None:
            self._earlier = left
            for attribute in left:
                if self._model.get_submodule(attribute.owner) not in self._here:
                    leave_out(attribute, self._model)
        return replace(payload, note=note)


def _parts_of(model: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
    return [part for name in names for part in model.get_submodule(name).named_modules(prefix=name)]
