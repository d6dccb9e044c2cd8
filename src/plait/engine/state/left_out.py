"""A warning of what an optimizer keeps beside its state, which no checkpoint holds.

Checkpoints and recovery hold `optimizer.state` and the numbers of `param_groups`. An optimizer may
keep more in attributes: slow weights, or another optimizer that has a state of its own. A run that
goes on would begin those again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from plait.engine.whole_tensors import WholeOptimizer

HELD = ("state", "param_groups", "defaults")
"""Attributes of every optimizer, of which a checkpoint holds the first two."""


def warn_of_what_is_left_out(optimizer: torch.optim.Optimizer) -> None:
    """Tell which attribute of an optimizer holds what checkpoints leave out."""
    left_out = _left_out(optimizer)
    if left_out is not None:
        warnings.warn(
            f"{type(optimizer).__name__} keeps {left_out}, and checkpoints and recovery hold "
            "optimizer.state alone: a run that goes on begins it again, and its losses differ; "
            "keep what a step needs in optimizer.state[param]",
            stacklevel=2,
        )


def _left_out(optimizer: torch.optim.Optimizer) -> str | None:
    """The words for what an optimizer keeps outside its state, and where; None for nothing."""
    if isinstance(optimizer, WholeOptimizer):  # it has the inner state in its own
        return _left_out(optimizer.inner)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    shapes = {param.shape for param in params if param.numel() > 1}
    held = {id(leaf) for leaf in (*params, *_leaves(optimizer.state))}
    for name, value in vars(optimizer).items():
        if name in HELD:
            continue
        leaves = [leaf for leaf in _leaves(value) if id(leaf) not in held]
        for inner in leaves:
            if not isinstance(inner, torch.optim.Optimizer):
                continue
            if inner.state and inner.state is not optimizer.state:
                return f"the state of a {type(inner).__name__} in its attribute '{name}'"
            further = _left_out(inner)
            if further is not None:
                return further
        alike = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.shape in shapes]
        if shapes and len(alike) >= len(params):  # fewer may be tables of constants
            return f"{len(alike)} tensors of its parameters' shapes in its attribute '{name}'"
    return None


def _leaves(value: object) -> Iterator[Tensor | torch.optim.Optimizer]:
    """Tensors and optimizers in lists, tuples and mappings."""
    if isinstance(value, (Tensor, torch.optim.Optimizer)):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
