"""Attributes in which the modules of a block keep something, such as a count or a list.

A forward reads there what the one before has left, as long as none of them runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.held import TableEntries, hooks_of_modules, tables_of_modules


class Attributes:
    """The attributes of the modules of one block, and the entries of tables in them.

    The first forward may register hooks, and note that in an attribute.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._hooks = hooks_of_modules(block)

    @contextmanager
    def watched(self) -> Iterator[TableEntries]:
        """Around a forward: the attributes that it changes, as they were before."""
        before = TableEntries([*tables_of_modules(self._block), *self._hooks])
        self._hooks = []
        try:
            yield before
        finally:
            before.forget_unchanged(_without_graph)


def _without_graph(value: Any) -> Any:
    """A tensor [...] without its graph, which would keep those of all forwards before it.

    Modes that watch what the forward reads do not see this.
    """
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    with torch._C.DisableTorchFunction():
        return value.detach().requires_grad_()
