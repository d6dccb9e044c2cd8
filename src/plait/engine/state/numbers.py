"""The numbers that the modules of a model hold beside their parameters: counts, flags, means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

Slot = tuple[str, str]
"""The path of a module and the name of its attribute or buffer."""


def numbers_of(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[nn.Module, Slot, float | Tensor]]:
    """The numbers and flags in attributes, and buffers and other tensors [...] of one number.

    Each comes with its module, of those that are given by their paths.
    """
    for path, module in modules:
        tables: tuple[dict[str, Any], ...] = (vars(module), module._buffers)
        for table in tables:
            for name, value in table.items():
                if type(value) in (bool, int, float) or (
                    type(value) is Tensor and value.numel() == 1 and not value.is_meta
                ):
                    yield module, (path, name), value
