"""Calls of torch's functions that drop numbers at random: of dropout, and of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from plait.values import PyTree

_RATE = 4  # where attention takes it among its arguments
_QUERY_AND_KEY = ((0, "query"), (1, "key"))


def rate_of(function: PyTree, args: Sequence[PyTree], named: Mapping[str, PyTree]) -> float:
    """The rate at which a call returns a tensor with numbers dropped; 0 for any other call.

    A call that drops numbers where they lie is another, since its caller may use that tensor.
    """
    if function is F.dropout:
        if args[3] if len(args) > 3 else named.get("inplace", False):
            return 0.0
        is_training = args[2] if len(args) > 2 else named.get("training", True)
        rate = args[1] if len(args) > 1 else named.get("p", 0.5)
        return float(rate) if is_training else 0.0
    if function is F.scaled_dot_product_attention:
        return float(args[_RATE] if len(args) > _RATE else named.get("dropout_p", 0.0))
    return 0.0


def is_attention(function: PyTree) -> bool:
    """Whether a call is of torch's attention, which drops its weights and returns a product."""
    return function is F.scaled_dot_product_attention


def without_rate(args: Sequence[PyTree], named: Mapping[str, PyTree]) -> tuple[PyTree, PyTree]:
    """The arguments of a call of attention that drops nothing."""
    if len(args) > _RATE:
        return (*args[:_RATE], 0.0, *args[_RATE + 1 :]), dict(named)
    return tuple(args), {**named, "dropout_p": 0.0}


def dropped_by(args: Sequence[PyTree], named: Mapping[str, PyTree]) -> Any:
    """The tensor [...] that `F.dropout` drops numbers of."""
    return args[0] if args else named["input"]


def shape_of(function: PyTree, args: Sequence[PyTree], named: Mapping[str, PyTree]) -> torch.Size:
    """The shape of what a call drops numbers of; of attention that of its weights.

    Queries and keys may have other dims before the last two. They are stretched to one shape.
    """
    if not is_attention(function):
        return torch.Size(dropped_by(args, named).shape)
    query, key = (args[at] if len(args) > at else named[name] for at, name in _QUERY_AND_KEY)
    is_grouped = named.get("enable_gqa", False)
    before = [query.shape[:-2], key.shape[:-3] if is_grouped else key.shape[:-2]]
    if is_grouped:
        before[1] = torch.Size([*before[1], query.shape[-3]])
    return torch.Size([*torch.broadcast_shapes(*before), query.shape[-2], key.shape[-2]])
