"""Tensors that values hold: in lists, in dictionaries, and inside objects of any kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.values import PyTree


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
