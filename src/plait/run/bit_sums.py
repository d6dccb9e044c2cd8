"""Marks of parameters: a sum over the bits of each, which differs where one bit does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from plait.engine.state.shards import module_shards

if TYPE_CHECKING:
    from plait.engine.engine import Engine

Place = tuple[str, object, int, int]
"""A parameter, and which of its elements."""
Marks = dict[Place, int]
WIDTHS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def marks_of(engine: Engine) -> Marks:
    """The sum over the bits of each parameter that this rank's modules hold."""
    return {
        (shard.name, shard.box, shard.start, shard.stop): mark(shard.values)
        for shard in module_shards(engine.holding)
    }


def mark(values: Tensor) -> int:
    """A number of all bits of `values` [...], without a copy: it differs where one bit does."""
    flat = values.detach().reshape(-1)
    whole = flat.view(WIDTHS[values.element_size()])
    return int(whole.sum(dtype=torch.int64))
