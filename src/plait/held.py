"""Tensors and tables that values hold: in lists, in dictionaries, inside objects of any kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.values import PyTree

Table = list[Any] | dict[Any, Any]
_HOLD_NONE = (Tensor, str, int, float, type(None), type, ModuleType, nn.Module)


class TableEntries:
    """The entries that some lists and dictionaries hold now, to be put back later."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._held = [(one, [*one] if isinstance(one, list) else dict(one)) for one in tables]

    def now(self) -> TableEntries:
        """The entries of the same lists and dictionaries by now."""
        return TableEntries(table for table, _ in self._held)

    def put_back(self) -> None:
        """Let each hold that alone. What it holds already is not written."""
        for table, held in self._held:
            if isinstance(table, list):
                if list(map(id, table)) != list(map(id, held)):
                    table[:] = held
            elif isinstance(held, dict):
                for name in [name for name in table if name not in held]:
                    del table[name]
                for name, one in held.items():
                    if name not in table or table[name] is not one:
                        table[name] = one


def tables_of(values: Iterable[object]) -> Iterator[Table]:
    """The lists, dictionaries and tables of attributes in values, and in objects among them.

    Modules and what they hold are left out.
    """
    seen: dict[int, object] = {}
    left = [*values]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, _HOLD_NONE):
            continue
        seen[id(one)] = one
        if isinstance(one, (list, dict)):
            yield one
        if hasattr(one, "__dict__"):
            yield vars(one)
        left.extend(held_by(one))


def held_tensors(values: PyTree) -> Iterator[Tensor]:
    """The tensors [...] of values, and of objects among them, such as a cache of keys."""
    seen: set[int] = set()
    left = tree_leaves(values)
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            yield one
        elif id(one) not in seen and not isinstance(one, (type, ModuleType, nn.Module)):
            seen.add(id(one))
            left.extend(held_by(one))


def held_by(value: object) -> Iterator[object]:
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


def plain_tensors(values: PyTree) -> Iterator[Tensor]:
    """The tensors [...] of values in lists, tuples and dictionaries alone."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from plain_tensors(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from plain_tensors(value)
