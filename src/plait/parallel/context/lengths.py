"""Lengths that nothing else in a model has, and a group that knows nothing but lengths.

A rehearsal tells positions from features by them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from plait.errors import ModelError
from plait.parallel.context.group import ContextGroup
from plait.parallel.context.shared import check_call, masks_fit, zeros_of
from plait.torch_internals import no_dispatch_modes
from plait.values import PyTree

RANKS = 3
SAMPLES = 2
PARTS = (7, 5, 3, 11, 13, 17, 19, 23, 29, 31, 37)
LENGTHS_TRIED = 3
PACKED = 3  # queries, keys and values in one tensor, as torch's own attention makes it
SHORT = ((5, 7), (3, 5), (7, 11), (11, 13))  # parts and wholes, for models of short sequences


class LengthsOnly(ContextGroup):
    """A group without ranks: what it gathers and takes has the right shapes, and no values."""

    learns = True

    def __init__(
        self, strategy: str, part: int, whole: int, size: int, *, closed: bool = False
    ) -> None:
        self.strategy = strategy
        self.whole_outputs = closed
        self.seq_len = whole
        self.size = size  # of the axis that is meant
        self._part = part

    @property
    def length(self) -> int:
        """The positions of a sequence that a rank holds."""
        return self._part

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """A tensor as long as a part."""
        with no_dispatch_modes():
            return self._like(whole, dim, self.length)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """A tensor as long as the whole."""
        with no_dispatch_modes():
            return self._like(part, dim, self.seq_len)

    def _like(self, x: Tensor, dim: int, length: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = length
        return torch.zeros(shape, dtype=x.dtype, device=x.device)

    def attend(  # as torch's function  # noqa: PLR0917
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **how: object,
    ) -> Tensor:
        """Attention's checks, and zeros [batch, heads, queries, value_size] as its result.

        Queries, keys and values are parts of a sequence, or whole outside of the blocks.
        """
        if self.is_part(q, -2) or self.is_part(k, -2):
            check_call(self, q, k, dropout_p, self.size)
            masks_fit(self, attn_mask)
        with no_dispatch_modes():
            return zeros_of(q, v)


def inputs_like(example: PyTree, length: int | None, device: str) -> PyTree:
    """Inputs like the example's, of another length and without values.

    Args:
        example: tensors [batch, sequence, ...]; every dim behind the first that is as long as the
            sequence is one of it.
        length: of the sequences of the result, which has `SAMPLES` samples. None: every dim behind
            the first stays, as that of pictures.
        device: `meta`, or `cpu` where the model reads values; they are zeros.
    """
    lengths = [x.shape[1] for x in tree_leaves(example) if isinstance(x, Tensor) and x.dim() > 1]

    def make(leaf: Tensor) -> Tensor:
        shape = [SAMPLES, *leaf.shape[1:]]
        for dim in range(1, leaf.dim()):
            if length is not None and leaf.shape[dim] == lengths[0]:
                shape[dim] = length
        return torch.zeros(shape, dtype=leaf.dtype, device=device)

    return tree_map_only(Tensor, make, example)


def unlike_sizes(model: nn.Module) -> list[int]:
    """Lengths of parts that no dim of the model has, nor one of their multiples that are met.

    Raises:
        ModelError: every length is a size of the model.
    """
    parts = parts_unlike(model, {PACKED})
    parts = [part for part in parts if RANKS * part not in _sizes(model)]
    if not parts:
        raise ModelError(f"every length of {PARTS} is a size of the model; leave cp out")
    return parts[:LENGTHS_TRIED]


def parts_unlike(model: nn.Module, others: set[int]) -> list[int]:
    """Lengths of parts that no dim of the model has, and none of `others`."""
    sizes = _sizes(model) | others
    return [part for part in PARTS if not sizes & {part, SAMPLES * part}]


def short_lengths(model: nn.Module) -> list[tuple[int, int]]:
    """Lengths for models that take no more than some positions: a whole need not be some parts."""
    sizes = _sizes(model)
    return [
        (part, whole)
        for part, whole in SHORT
        if not sizes & {part, whole, SAMPLES * part, SAMPLES * whole}
    ]


def _sizes(model: nn.Module) -> set[int]:
    tensors = [*model.parameters(), *model.buffers()]
    return {size for tensor in tensors for size in tensor.shape}
