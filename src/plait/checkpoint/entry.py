"""A saved shard as the header of its file names it, and the views that loading copies between."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.mesh import Shard
from plait.mesh.boxes import Rectangle
from plait.values import JsonObject

RANDOM_PREFIX = "random/"
"""States of random generators, one tensor a rank: kept out of `check` and of exports."""


RANK_PREFIX = "rank/"
"""Tensors that every rank has for itself, in a snapshot alone."""


def entry_of(shard: Shard) -> JsonObject:
    """The shard without its values, as JSON."""
    return {
        "name": shard.name,
        "shape": list(shard.global_shape),
        "offset": list(shard.box.offset),
        "extent": list(shard.box.extent),
        "start": shard.start,
        "stop": shard.stop,
        "dtype": dtype_name(shard.values.dtype),
    }


def view(tensor: Tensor, rectangle: Rectangle) -> Tensor:
    """One rectangle of a flat range, in its shape, as a view of the range's 1-D tensor."""
    box = rectangle.box
    return tensor[rectangle.position : rectangle.position + box.numel].view(box.extent)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
