"""Lists of texts in a batch, as a `DataLoader` collates the texts of samples."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from plait.values import PyTree


def is_texts(value: object) -> bool:
    """Whether a value is a list or a tuple of texts, or of bytes, and of nothing else."""
    return (
        isinstance(value, list | tuple)
        and type(value) in (list, tuple)
        and len(value) > 0
        and all(isinstance(one, str | bytes) for one in value)
    )


def cut_samples(
    batch: PyTree, part_of: Callable[[Tensor], Tensor], place: Callable[[int], slice]
) -> PyTree:
    """A part of a batch: `part_of` cuts tensors (samples, ...), `place` says where lists of as many
    texts are cut.

    Texts are never none: one stands in where there is no sample.
    """
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}

    def part(leaf: PyTree) -> PyTree:
        if isinstance(leaf, Tensor):
            return part_of(leaf)
        if is_texts(leaf) and sizes == {len(leaf)}:
            return leaf[place(len(leaf))] or leaf[:1]
        return leaf

    return tree_map(part, batch, is_leaf=is_texts)
