"""The samples of a batch, as short marks of their bytes.

Two runs that train on one batch have equal marks. So a sample that no rank has read, or that two
have read, is known by itself. It need not be guessed from a gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from plait.batch_trees import SampleList, held_leaves, is_per_sample, is_texts, leaves_of, sizes_of
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
    """One mark for each row of the tensors and each entry of the lists of samples.

    Texts count where there are neither, since other lists of texts are metadata. What a dataclass
    holds has no marks: it may be more than samples.
    """
    given = [(leaf, held) for leaf, held in held_leaves(tree) if not held]
    leaves = [leaf for leaf, _ in given]
    found = [leaf for leaf in leaves if _has_samples(leaf)] or [*filter(is_per_sample, leaves)]
    count = min(sizes_of(given) or map(len, found), default=0)
    return [_mark([leaf[row] for leaf in found]) for row in range(count)]


def _has_samples(leaf: PyTree) -> bool:
    return isinstance(leaf, SampleList) or (isinstance(leaf, Tensor) and leaf.dim() > 0)


def _mark(values: Sequence[PyTree]) -> str:
    """Equal for equal numbers and texts, whatever precision numbers are stored in."""
    digest = hashlib.blake2b(digest_size=8)
    for value in chain.from_iterable(map(leaves_of, values)):
        if isinstance(value, Tensor):
            wide = value.detach().cpu()
            wide = wide.to(torch.float64 if wide.is_floating_point() else torch.int64)
            digest.update(wide.contiguous().numpy().tobytes())
        elif is_texts(value) or isinstance(value, str | bytes | int | float):
            digest.update(repr(value).encode())
    return digest.hexdigest()
