"""The numbers that the modules of a model hold beside their parameters: counts, flags, means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from plait.held import is_table

Slot = tuple[str, str]
"""The path of a module and the name of its attribute or buffer, or of an entry in one."""
MOST = 64
"""The entries of a table that are looked at; longer ones hold data rather than counts."""


def numbers_of(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[nn.Module, Slot, float | Tensor]]:
    """The numbers and flags in attributes, and buffers and other tensors [...] of one number.

    Attributes may be short lists, queues and dictionaries of such numbers. Each number comes with
    its module, of those that are given by their paths.
    """
    for path, module in modules:
        for name, value in _values_of(module):
            if type(value) in (bool, int, float) or (
                type(value) is Tensor and value.numel() == 1 and not value.is_meta
            ):
                yield module, (path, name), value


def _values_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes and buffers of a module by name, and the entries of tables in attributes."""
    for name, value in vars(module).items():
        yield name, value
        if is_table(value) and name not in _OF_ALL_MODULES and len(value) <= MOST:
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}[{key}]", one) for key, one in entries)
    yield from module._buffers.items()


_OF_ALL_MODULES = frozenset(vars(nn.Module()))
