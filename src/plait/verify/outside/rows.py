"""Which samples of the global batch each rank computed on, found by comparing inputs.

A framework's sampler is not asked: the inputs that the model was called with are looked up in the
batch. So samples that no rank sees, and samples that two data ranks see, are found as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.batch_trees import SampleList, is_per_sample, leaves_of
from plait.errors import some_of
from plait.values import PyTree
from plait.verify.diagnosis.finding import Facts, Finding
from plait.verify.reference.batches import Batch, taken
from plait.verify.reference.one_device import Slice

Rows = tuple[tuple[int, ...], ...]
"""The samples of each call of the model, in order of the calls."""


@dataclass(frozen=True)
class Reading:
    """The reading of one step: `lines` are groups of ranks that saw equal samples, with them."""

    num_samples: int
    lines: Mapping[Rows, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether any rank's inputs were found in the batch."""
        return bool(self.lines)

    @property
    def is_partition(self) -> bool:
        """Whether every sample was seen once by one group of ranks."""
        seen = sorted(chain.from_iterable(chain.from_iterable(self.lines)))
        return seen == list(range(self.num_samples))

    def without_repeats(self) -> Reading:
        """The reading of samples once, where a rank's calls repeat samples of that rank."""
        lines: dict[Rows, tuple[int, ...]] = {}
        for rows, ranks in self.lines.items():
            once = tuple(dict.fromkeys(rows))
            lines[once] = (*lines.get(once, ()), *ranks)
        return Reading(self.num_samples, lines)

    def facts(self, world_size: int) -> Facts:
        """Sizes of axes and of micro-batches, as far as they were seen.

        Ranks with equal samples split layers, and ranks that met no sample are later stages.
        """
        sizes = {"dp": world_size}
        lines: dict[str, Sequence[tuple[int, ...]]] = {}
        if not self.is_known:
            return Facts(sizes)
        groups = list(self.lines.values())
        sizes["dp"] = len(groups)
        sizes["mb"] = max(len(rows) for rows in self.lines)
        if len(groups) > 1:
            lines["dp"] = [tuple(ranks[0] for ranks in groups)]
        alike = {len(ranks) for ranks in groups}
        if alike == {world_size // len(groups)} and alike != {1}:
            sizes["tp"] = world_size // len(groups)  # they share the samples, and so the layers
            lines["tp"] = groups
        elif world_size > len(groups):
            sizes["pp"] = world_size // len(groups)
        return Facts(sizes, lines=lines)

    def slices(self, batch: Batch) -> list[Slice]:
        """The slice of each data rank and micro-batch; empty unless they are a partition."""
        if not self.is_partition:
            return []
        return [
            Slice(rank, index, taken(batch, rows))
            for rank, calls in enumerate(self.lines)
            for index, rows in enumerate(calls)
        ]

    def finding(self) -> Finding | None:
        """The samples that were not seen, or seen by several groups of ranks."""
        if not self.is_known or self.is_partition:
            return None
        ranks_of: dict[int, list[str]] = {index: [] for index in range(self.num_samples)}
        for rows, ranks in self.lines.items():
            for index in chain.from_iterable(rows):
                ranks_of[index].append(_ranks(ranks))
        missing = [index for index, seen in ranks_of.items() if not seen]
        twice = [index for index, seen in ranks_of.items() if len(set(seen)) > 1]
        again = [index for index, seen in ranks_of.items() if len(seen) > 1 == len(set(seen))]
        parts = []
        if missing:
            parts.append(f"no rank computed on sample {numbers(missing)} of the global batch")
        if twice:
            who = dict.fromkeys(ranks_of[twice[0]])
            parts.append(f"sample {numbers(twice)} was computed on by {' and by '.join(who)}")
        if again:
            who = dict.fromkeys(ranks_of[index][0] for index in again)
            parts.append(f"sample {numbers(again)} was computed on twice by {' and by '.join(who)}")
        return Finding("data-split", "data", "; ".join(parts), 0.96)


def rows_of(inputs: PyTree, keys: Mapping[bytes, int]) -> tuple[int, ...]:
    """The numbers of the samples in the first tensor or list of these inputs; empty where one is
    unknown.
    """
    for leaf in tree_leaves(inputs, is_leaf=lambda node: _are_keyed(node, keys)):
        if _are_keyed(leaf, keys):
            return tuple(keys[_key(one)] for one in leaf)
        if isinstance(leaf, Tensor) and leaf.dim() and type(leaf) is Tensor:
            found = [keys.get(_key(row)) for row in leaf]
            if any(index is None for index in found):
                found = _packed(leaf, keys)
            if found:
                return tuple(index for index in found if index is not None)
    return ()


def _are_keyed(node: PyTree, keys: Mapping[bytes, int]) -> bool:
    """Whether a node is a list of samples that are known, one for each entry."""
    is_list = isinstance(node, list) or is_per_sample(node)
    return is_list and len(node) > 0 and all(_key(one) in keys for one in node)


def _packed(leaf: Tensor, keys: Mapping[bytes, int]) -> list[int | None]:
    """The samples that lie one behind the other in rows; empty where one is unknown."""
    size = len(next(iter(keys), b""))
    whole = b"".join(_key(row) for row in leaf)
    if not size or len(_key(leaf[0])) % size:
        return []
    found = [keys.get(whole[start : start + size]) for start in range(0, len(whole), size)]
    return [] if any(index is None for index in found) else found


def samples_in_a_row(inputs: PyTree, rows: Sequence[int]) -> int:
    """How many samples a row of the first input holds."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf):
            return max(len(rows) // len(leaf), 1)
    return 1


def keys_of(batch: Batch) -> dict[bytes, int]:
    """The number of each sample of a global batch, by its bytes; empty where two are alike.

    It is empty too where the inputs have neither a tensor nor a list of samples.
    """
    leaves = leaves_of(batch[0])
    counted = [leaf for leaf in leaves if isinstance(leaf, Tensor | SampleList)]
    first: PyTree = next(iter([*counted, *filter(is_per_sample, leaves)]), ())
    keys = {_key(row): index for index, row in enumerate(first)}
    return keys if len(keys) == len(first) else {}


def reading(ranks: Sequence[Rows], num_samples: int) -> Reading:
    """The reading from the rows of all ranks, in rank order."""
    lines: dict[Rows, tuple[int, ...]] = {}
    for rank, rows in enumerate(ranks):
        kept = tuple(call for call in rows if call)
        if kept:
            lines[kept] = (*lines.get(kept, ()), rank)
    return Reading(num_samples, lines)


def _key(row: PyTree) -> bytes:
    """The bytes of a sample: of a row of a tensor, or of the tensors and texts of an entry."""
    if isinstance(row, Tensor):
        value = row.detach().cpu().contiguous()
        return value.reshape(-1).view(torch.uint8).numpy().tobytes()
    parts = leaves_of(row)
    return b"".join(_key(one) if isinstance(one, Tensor) else repr(one).encode() for one in parts)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"


def numbers(values: Sequence[int]) -> str:
    """The first of these numbers, and how many more."""
    return some_of(values, 6)
