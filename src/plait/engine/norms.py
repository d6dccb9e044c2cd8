"""Which norms of all numbers of a tensor are sums over samples, or the roots of such sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

ORDERS: Final = {
    "norm": ("p", 1),
    "linalg_norm": ("ord", 1),
    "linalg_vector_norm": ("ord", 1),
    "dist": ("p", 2),
}
"""Norms by name, with the name and the place of their orders."""


def order_of_norm(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> int:
    """1 for a sum of absolute numbers, 2 for the root of a sum of squares, else 0.

    A matrix has other norms under the orders of `linalg.norm`.
    """
    if name not in ORDERS:
        return 0
    key, place = ORDERS[name]
    order = named.get(key, args[place] if len(args) > place else None)
    if order is None or order == "fro":
        return 2
    is_of_a_matrix = name == "linalg_norm" and isinstance(args[0], Tensor) and args[0].dim() > 1
    return int(order) if order in (1, 2) and not is_of_a_matrix else 0


def is_square(name: str, args: Sequence[Any]) -> bool:
    """Whether a function makes the square of one number."""
    if name in ("mul", "multiply"):
        return len(args) == 2 and args[0] is args[1]
    return name == "square" or (name == "pow" and len(args) > 1 and args[1] == 2)


def is_root(name: str, args: Sequence[Any]) -> bool:
    """Whether a function makes the square root of one number."""
    return name == "sqrt" or (name == "pow" and len(args) > 1 and args[1] == 0.5)
