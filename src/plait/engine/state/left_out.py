"""A warning of what an optimizer keeps beside its state, which no checkpoint holds.

Checkpoints and recovery hold `optimizer.state[param]` and the numbers of `param_groups`. An
optimizer may keep more: a count as `state["k"]`, slow weights, or another optimizer that has a
state of its own. A run that goes on would begin those again.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.engine.state.own_counts import OwnCounts
from plait.engine.whole_tensors import WholeOptimizer
from plait.torch_internals import storage_key

HELD = ("state", "param_groups", "defaults")
"""Attributes of every optimizer, of which a checkpoint holds the first two."""


def warn_of_what_is_left_out(optimizer: torch.optim.Optimizer, counts: OwnCounts) -> None:
    """Tell which attribute of an optimizer holds what checkpoints leave out."""
    left_out = _left_out(optimizer)
    if left_out is None and (name := counts.changed()) is not None:
        left_out = f"a count in its attribute '{name}', which its steps change"
    if left_out is not None:
        warnings.warn(
            f"{type(optimizer).__name__} keeps {left_out}, and checkpoints and recovery hold "
            "optimizer.state[param] and the numbers of its groups alone: a run that goes on begins "
            "it again, and its losses may differ; keep what a step needs in "
            "optimizer.state[param], or a count in its group, as group['step']",
            stacklevel=2,
        )


def _left_out(optimizer: torch.optim.Optimizer, around: Sequence[object] = ()) -> str | None:
    """The words for what an optimizer keeps outside its state, and where; None for nothing.

    `around`: the optimizers that hold this one, which it may hold too.
    """
    if isinstance(optimizer, WholeOptimizer):  # it has the inner state in its own
        return _left_out(optimizer.inner)
    around = (*around, optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for key in optimizer.state:
        if not isinstance(key, Tensor):
            return f"'{key}' in its state, which is no parameter's"
    shapes = {param.shape for param in params if param.numel() > 1}
    grads = [param.grad for param in params if param.grad is not None]
    held = {_memory(leaf) for leaf in (*params, *grads, *_leaves(optimizer.state))}
    for name, value in vars(optimizer).items():
        if name in HELD:
            continue
        leaves = [leaf for leaf in _leaves(value) if _memory(leaf) not in held]
        for inner in leaves:
            if not isinstance(inner, torch.optim.Optimizer) or any(inner is one for one in around):
                continue
            if any(optimizer.state.get(key) is not kept for key, kept in inner.state.items()):
                return f"the state of a {type(inner).__name__} in its attribute '{name}'"
            further = _left_out(inner, around)
            if further is not None:
                return further
        alike = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.shape in shapes]
        if shapes and len(alike) >= len(params):  # fewer may be tables of constants
            return f"{len(alike)} tensors of its parameters' shapes in its attribute '{name}'"
    return None


def _memory(leaf: Tensor | torch.optim.Optimizer) -> int:
    """A number that tensors of one memory share, as a parameter and what is detached from it."""
    return storage_key(leaf) if isinstance(leaf, Tensor) else id(leaf)


def _leaves(value: object) -> list[Tensor | torch.optim.Optimizer]:
    """Tensors and optimizers in lists, tuples and mappings."""
    return [
        leaf for leaf in tree_leaves(value) if isinstance(leaf, (Tensor, torch.optim.Optimizer))
    ]
