"""The tensors of what a model takes or gives, whatever holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from types import SimpleNamespace

from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.values import PyTree


def tensors_in(tree: PyTree) -> Iterator[Tensor]:
    """All tensors, of any shape, of a tree, and those that are attributes of an object in it (a
    dataclass).
    """
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) or isinstance(leaf, SimpleNamespace):
            yield from tensors_in(list(vars(leaf).values()))
