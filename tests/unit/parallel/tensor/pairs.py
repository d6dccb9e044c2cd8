"""A column and its row (and a norm between) on simulated ranks, beside the same on one device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import World
from plait.parallel.tensor import TensorGroup, TensorSplit, apply
from plait.plan import Plan
from tests.helpers.threaded import threaded


@dataclass(frozen=True)
class Sizes:
    samples: int
    sequence: int
    into: int
    middle: int
    out: int


def pair(
    sizes: Sizes, *, bias: bool, norm: Callable[[int], nn.Module] | None = None
) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["up"] = nn.Linear(sizes.into, sizes.middle, bias=bias)
    layers["act"] = nn.GELU()
    layers["down"] = nn.Linear(sizes.middle, sizes.out, bias=bias)
    if norm is not None:
        layers["norm"] = norm(sizes.out)
    return nn.Sequential(layers).double()


ROLES = {"up": "column", "down": "row"}


def group_of(world: World, plan_text: str, gather_limit_bytes: int = 64 << 20) -> TensorGroup:
    tp = Plan.parse(plan_text).tp
    return TensorGroup(world, tp.mode, tp.sequence_parallel, plan_text, gather_limit_bytes)


def split_with_values(
    world: World, model: nn.Module, roles: dict[str, str], plan_text: str, limit: int = 64 << 20
) -> TensorSplit:
    """Split a model that has values, and give each rank its part."""
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    split = apply(model, roles, group_of(world, plan_text, limit))
    for name, param in model.named_parameters():
        param.data = split.placements[name].cut(whole[name]).clone()
    return split


def collect(split: TensorSplit, tensors: dict[str, Tensor]) -> dict[str, tuple[Any, Tensor]]:
    return {name: (split.placements[name], tensor.clone()) for name, tensor in tensors.items()}


def whole_of(parts: list[tuple[Any, Tensor]]) -> Tensor:
    """Put boxes together; copies must be equal bit by bit, and every element must be there."""
    first = parts[0][0]
    full = torch.full(first.view, float("nan"), dtype=parts[0][1].dtype)
    for placement, value in parts:
        box = tuple(
            slice(o, o + e) for o, e in zip(placement.box.offset, placement.box.extent, strict=True)
        )
        boxed = value.reshape(placement.box.extent)
        known = ~full[box].isnan()
        assert torch.equal(full[box][known], boxed[known])
        full[box] = boxed
    assert not full.isnan().any()
    return full.reshape(first.shape)


def run_ranks(plan: str, fn: Callable[[World], Any]) -> list[Any]:
    return threaded(Plan.parse(plan).world_size, fn, plan=plan)
