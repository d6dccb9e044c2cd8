"""Tensors and tables that values hold: in lists, in dictionaries, inside objects of any kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.values import PyTree

Table = list[Any] | deque[Any] | dict[Any, Any]
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"_buffers"}
_HOOKS = [name for name in _OF_ALL_MODULES if "hook" in name and "state_dict" not in name]
_HOLD_NONE = (Tensor, str, int, float, type(None), type, ModuleType, nn.Module)


class TableEntries:
    """The entries that some lists, queues and dictionaries hold now, to be put back later."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._held = [(one, _entries(one)) for one in tables]

    def now(self) -> TableEntries:
        """The entries of the same tables by now."""
        return TableEntries(table for table, _ in self._held)

    def put_back(self) -> None:
        """Let each hold that alone. What it holds already is not written."""
        for table, held in self._held:
            if not _differ(table, held):
                continue
            if isinstance(table, dict) and isinstance(held, dict):
                for name in [name for name in table if name not in held]:
                    del table[name]
                for name, one in held.items():
                    if name not in table or table[name] is not one:
                        table[name] = one
            elif not isinstance(table, dict):
                table.clear()
                table.extend(held)

    def forget_unchanged(self, keep: Callable[[Any], Any]) -> None:
        """Forget the tables that hold the same by now, and of others keep `keep` of each entry."""
        changed = [(table, held) for table, held in self._held if _differ(table, held)]
        self._held = [(table, _mapped(keep, held)) for table, held in changed]


def tables_of(values: Iterable[object]) -> Iterator[Table]:
    """The lists, queues, dictionaries and tables of attributes in values and in objects among them.

    Modules and what they hold are left out.
    """
    seen: dict[int, object] = {}
    left = [*values]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, _HOLD_NONE):
            continue
        seen[id(one)] = one
        if is_table(one):
            yield one
        if hasattr(one, "__dict__"):
            yield vars(one)
        left.extend(held_by(one))


def tables_of_modules(module: nn.Module) -> list[Table]:
    """The attributes of a module and its submodules, their buffers, and the tables in attributes.

    Those of parameters, of submodules and of hooks are left out.
    """
    attributes: list[Table] = [vars(one) for one in module.modules()]
    return [*attributes, *filter(is_table, own_attributes(module).values())]


def own_attributes(module: nn.Module) -> dict[object, Any]:
    """The attributes of a module and its submodules that not every module has, and their buffers.

    Each has the number of its module and its name.
    """
    return {
        (place, name): table[name]
        for place, table in enumerate(map(vars, module.modules()))
        for name in table.keys() - _OF_ALL_MODULES
    }


def hooks_of_modules(module: nn.Module) -> list[Table]:
    """The tables of hooks of a module and its submodules."""
    named = (vars(one).get(name) for one in module.modules() for name in _HOOKS)
    return [*filter(is_table, named)]


def tensors_in(values: Mapping[object, object]) -> Iterator[tuple[object, Tensor]]:
    """The tensors [...] among values and in tables among them, each with its key."""
    for key, value in values.items():
        if isinstance(value, Tensor):
            yield key, value
        elif is_table(value):
            named = value.items() if isinstance(value, dict) else enumerate(value)
            for name, one in named:
                if isinstance(one, Tensor):
                    yield (key, name), one


def is_table(value: object) -> TypeGuard[Table]:
    """Whether a value is a list, a queue or a dictionary, which holds entries that may change."""
    return isinstance(value, (list, deque, dict))


def _entries(table: Table) -> Table:
    return dict(table) if isinstance(table, dict) else [*table]


def _differ(one: Table, other: Table) -> bool:
    """Whether two tables hold other objects, or hold them in another order."""
    if isinstance(one, dict) and isinstance(other, dict):
        names_differ = [*one] != [*other]
        return names_differ or [*map(id, one.values())] != [*map(id, other.values())]
    return [*map(id, one)] != [*map(id, other)]


def _mapped(keep: Callable[[Any], Any], table: Table) -> Table:
    if isinstance(table, dict):
        return {name: keep(one) for name, one in table.items()}
    return [keep(one) for one in table]


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
