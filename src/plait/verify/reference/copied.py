"""Copies of a model that share nothing with it, whatever its attributes hold.

`copy.deepcopy` keeps functions as they are. A lambda in an attribute would go on calling the layers
of the model that was copied, as `self.mlpf = lambda x: mlp.c_proj(mlp.c_fc(x))` does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import TypeVar

import torch
from torch import Tensor, nn

from plait.values import PyTree

Module = TypeVar("Module", bound=nn.Module)


def copied(model: Module) -> Module:
    """A copy whose functions hold the copy's own modules and tensors.

    Attributes that were computed of parameters, as `weight_norm` leaves them, are copied as values.
    Its hook computes them anew.
    """
    memo: dict[int, PyTree] = {}
    for module in model.modules():
        computed = (one for one in vars(module).values() if isinstance(one, Tensor))
        memo |= {id(one): one.detach().clone() for one in computed if not one.is_leaf}
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, FunctionType):
                vars(module)[key] = _bound_anew(value, memo)
            elif isinstance(value, dict):
                _bind_values(value, memo)
    return made


def in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its real numbers in a dtype; complex ones would lose a part of them."""
    return model._apply(lambda one: one.to(dtype) if one.is_floating_point() else one)


def _bind_values(table: dict[PyTree, PyTree], memo: Mapping[int, PyTree]) -> None:
    for key, value in list(table.items()):
        if isinstance(value, FunctionType):
            table[key] = _bound_anew(value, memo)


def _bound_anew(function: FunctionType, memo: Mapping[int, PyTree]) -> FunctionType:
    """The function, with the copies of what it holds; itself where nothing was copied."""
    cells = function.__closure__ or ()
    held = [_contents(cell) for cell in cells]
    if not any(id(one) in memo for one in held):
        return function
    fresh = tuple(
        CellType(memo[id(one)]) if id(one) in memo else cell
        for one, cell in zip(held, cells, strict=True)
    )
    bound = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, fresh
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def _contents(cell: CellType) -> PyTree:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
