"""An optimizer's state of a parameter as tensors by name, for checkpoints, and back.

SOAP keeps lists of matrices, some of them empty, and numbers beside. A name holds the way to a
leaf, with `#` before the index of a list. The kind of a leaf that is no tensor follows.

    {"GG": [tensor, []], "Q": None, "count": 3}   GG.#0  GG.#1:list  Q:none  count:int
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from plait.errors import CheckpointError
from plait.values import JsonObject

TREE = "tree."
"""How the names of leaves begin in the state of a parameter, beside its tensors and numbers."""
EMPTY: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "list": list,
    "tuple": tuple,
    "dict": dict,
}
"""Kinds of a leaf without a value."""
_MARKS = frozenset(".:#/")
NUMBERS: dict[str, Callable[[Any], object]] = {"bool": bool, "int": int, "float": float}


def flat(tree: Mapping[str, object]) -> dict[str, object]:
    """Tensors and numbers by name; 0 for a leaf without a value. Other objects stay as they are."""
    if not tree:
        return {}
    leaves = ((".".join(way), kind, leaf) for way, kind, leaf in _leaves(tree))
    return {f"{name}:{kind}" if kind else name: leaf for name, kind, leaf in leaves}


def grown(named: Mapping[str, Tensor]) -> JsonObject:
    """The tree of which `flat` made these names, with numbers as they were; tensors [...] stay as
    they are.
    """
    root: JsonObject = {}
    for name, tensor in named.items():
        way, _, kind = name.partition(":")
        *above, last = way.split(".")
        node = root
        for key in above:
            node = node.setdefault(key, {})
        if kind in EMPTY:
            node[last] = EMPTY[kind]()
        else:
            node[last] = NUMBERS[kind](tensor.item()) if kind else tensor
    made = _with_lists(root)
    assert isinstance(made, dict)
    return made


def is_tree(value: object) -> bool:
    """Whether `flat` takes a value apart or writes down that there is none, and `grown` makes it
    again.
    """
    if isinstance(value, Mapping):
        named = all(isinstance(key, str) and not _MARKS & set(key) for key in value)
        return named and all(_is_part(one) for one in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_part(one) for one in value)
    return value is None


def _is_part(value: object) -> bool:
    return isinstance(value, (Tensor, bool, int, float)) or is_tree(value)


def require_saveable(key: str, value: object) -> None:
    """Errors: `CheckpointError` for what is neither a tensor nor a number."""
    if not isinstance(value, (Tensor, int, float)):
        raise CheckpointError(
            f"the optimizer keeps '{key}' as a {type(value).__name__}; a checkpoint holds tensors, "
            "numbers, and lists of them or dicts with words as keys"
        )


def _leaves(tree: object, way: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """(way, kind, leaf) of each leaf; tensors have no kind."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*way, str(key)))
    elif isinstance(tree, (list, tuple)) and tree:
        for index, value in enumerate(tree):
            yield from _leaves(value, (*way, f"#{index}"))
    elif isinstance(tree, Tensor):
        yield way, "", tree
    elif tree is None or isinstance(tree, (list, tuple, Mapping)):
        yield way, "none" if tree is None else _kind(tree), 0
    else:
        yield way, type(tree).__name__, tree


def _kind(empty: object) -> str:
    """The kind of an empty container."""
    return next(name for name in ("list", "tuple", "dict") if name in type(empty).__name__.lower())


def _with_lists(node: object) -> object:
    """The tree with lists in the place of dicts from `#index`."""
    if not isinstance(node, dict):
        return node
    values = {key: _with_lists(value) for key, value in node.items()}
    if values and all(key.startswith("#") for key in values):
        return [values[f"#{index}"] for index in range(len(values))]
    return values
