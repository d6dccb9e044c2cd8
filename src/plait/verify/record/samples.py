"""The samples of a batch, as short marks of their bytes.

Two runs that train on one batch have equal marks. So a sample that no rank has read, or that two
have read, is known by itself. It need not be guessed from a gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.values import PyTree

Samples = Sequence[tuple[str, str]]
"""A mark of the inputs and one of the targets, for each sample."""


def samples_of(batch: PyTree) -> Samples:
    """The marks of a batch `(inputs, targets)`; none of a batch of another form."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return ()
    inputs, targets = (_marks(part) for part in batch)
    return list(zip(inputs, targets, strict=True)) if len(inputs) == len(targets) else ()


def _marks(tree: PyTree) -> list[str]:
    """One mark for each row of the tensors."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()]
    if not leaves:
        return []
    count = min(len(leaf) for leaf in leaves)
    return [_mark([leaf[row] for leaf in leaves]) for row in range(count)]


def _mark(values: Sequence[Tensor]) -> str:
    """Equal for equal numbers, whatever precision they are stored in."""
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        wide = value.detach().cpu()
        wide = wide.to(torch.float64 if wide.is_floating_point() else torch.int64)
        digest.update(wide.contiguous().numpy().tobytes())
    return digest.hexdigest()
