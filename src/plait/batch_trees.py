"""The tensors, texts and lists of samples of a batch, in whatever holds them.

That is a nesting that PyTorch knows, a mapping, a dataclass or a namespace.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_map

from plait.errors import DataError
from plait.values import PyTree


class SampleList(list[PyTree]):
    """A list in a batch that has one entry for each sample, such as images of unequal sizes.

    Each rank and micro-batch takes its entries. An entry may be any nesting of tensors [...],
    such as a dict of the boxes and labels of an image. A plain list in a batch is a nesting of
    tensors [samples, ...] instead.

    Attributes:
        is_placeholder: whether its one entry stands in for no sample, on a rank that has none.
    """

    def __init__(self, entries: Iterable[PyTree] = (), *, is_placeholder: bool = False) -> None:
        super().__init__(entries)
        self.is_placeholder = is_placeholder

    @property
    def num_samples(self) -> int:
        """How many samples the entries are."""
        return 0 if self.is_placeholder else len(self)


def is_texts(value: PyTree) -> bool:
    """Whether a value is a list or a tuple of texts, or of bytes, and of nothing else.

    A `DataLoader` collates the texts of samples so.
    """
    return (
        type(value) in (list, tuple)
        and len(value) > 0
        and all(isinstance(one, str | bytes) for one in value)
    )


def is_per_sample(leaf: PyTree) -> bool:
    """Whether a leaf is a list that may have one entry for each sample: texts, or `SampleList`."""
    return isinstance(leaf, SampleList) or is_texts(leaf)


def entries_at(leaf: PyTree, rows: Iterable[int]) -> PyTree:
    """The entries of a leaf that is per sample, at given rows; the first one instead of none.

    Errors: `DataError` for a `SampleList` with no entry at all.
    """
    found = [leaf[row] for row in rows]
    if isinstance(leaf, SampleList):
        if not leaf:
            raise DataError(
                "a batch has a plait.SampleList with no entry, and every rank computes at least "
                "one; a rank without samples gives one that does not count, "
                "plait.SampleList([entry], is_placeholder=True)"
            )
        return SampleList(found or leaf[:1], is_placeholder=not found)
    return type(leaf)(found or leaf[:1])


def leaves_of(tree: PyTree) -> list[PyTree]:
    """Tensors, texts, each `SampleList` and other leaves of a batch, in a fixed order."""
    return [leaf for leaf, _ in held_leaves(tree)]


def tensors_of(tree: PyTree) -> list[Tensor]:
    """All tensors [...] of a batch, also those in a `SampleList`, in a fixed order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


def held_leaves(tree: PyTree) -> list[tuple[PyTree, bool]]:
    """The leaves of a batch, and whether each is in a dataclass or a namespace.

    Such an object may have more than samples, such as the weights of classes.
    """
    found: list[tuple[PyTree, bool]] = []

    def note(leaf: PyTree, held: bool) -> PyTree:
        found.append((leaf, held))
        return leaf

    map_held(note, tree)
    return found


def map_leaves(function: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """A copy of a batch, of what `function` makes of each leaf.

    A mapping that is no dict and no `UserDict` becomes a dict.
    """
    return map_held(lambda leaf, _: function(leaf), tree)


def map_held(
    function: Callable[[PyTree, bool], PyTree],
    tree: PyTree,
    held: bool = False,
    around: tuple[int, ...] = (),
) -> PyTree:
    """A copy of a batch, of what `function` makes of each leaf and of whether it is held.

    `held`: an object holds the tree. `around`: ids of what holds it; an object inside itself
    stays.
    """

    def mapped(node: PyTree) -> PyTree:
        if id(node) in around:
            return node
        entries = _entries(node)
        if entries is None:
            return function(node, held)
        inside = held or not isinstance(node, Mapping)
        changed = map_held(function, entries, inside, (*around, id(node)))
        if all(changed[name] is entry for name, entry in entries.items()):
            return node
        return _with_entries(node, changed)

    return tree_map(mapped, tree, is_leaf=_is_own)


def map_tensors(function: Callable[[Tensor], Tensor], tree: PyTree) -> PyTree:
    """A copy of a batch, of what `function` makes of each tensor, in a `SampleList` too."""

    def mapped(leaf: PyTree) -> PyTree:
        if isinstance(leaf, SampleList):
            entries = (map_tensors(function, entry) for entry in leaf)
            return SampleList(entries, is_placeholder=leaf.is_placeholder)
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    return map_leaves(mapped, tree)


def structure_of(tree: PyTree) -> Hashable:
    """Types and names of all that holds the leaves of a batch."""
    nodes, structure = tree_flatten(tree, is_leaf=_is_own)
    return structure, *map(_own_structure, nodes)


def filled(tree: PyTree, leaves: Iterable[PyTree]) -> PyTree:
    """A copy of a batch, of other leaves in the order of `leaves_of`."""
    rest = iter(leaves)
    return map_leaves(lambda _: next(rest), tree)


def sizes_of(leaves: Iterable[tuple[PyTree, bool]]) -> list[int]:
    """The first dims of the tensors of `held_leaves`, and the lengths of each `SampleList`.

    Where objects hold all tensors, it is the first dims of these.
    """
    counted = [
        (leaf.num_samples if isinstance(leaf, SampleList) else leaf.size(0), held)
        for leaf, held in leaves
        if isinstance(leaf, SampleList) or (isinstance(leaf, Tensor) and leaf.dim() > 0)
    ]
    given = [count for count, held in counted if not held]
    return given or [count for count, _ in counted]


def agreed_size(leaves: Iterable[tuple[PyTree, bool]]) -> int:
    """The samples of `held_leaves`. Raises `DataError` where they differ, or there are none."""
    pairs = list(leaves)
    sizes = set(sizes_of(pairs))
    if not sizes:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf, _ in pairs})) or "nothing"
        raise DataError(
            f"a batch has no tensor whose first dim could count samples; it has {kinds}; give "
            "tensors [samples, ...] beside it, as the targets, or a plait.SampleList of one such "
            "object for each sample"
        )
    if len(sizes) != 1:
        raise DataError(
            "the tensors of a batch must agree in their first dim, the samples; they have "
            f"{sorted(sizes)}; a list with one entry for each sample is plait.SampleList(list); "
            "a graph stays whole where nothing divides the batch: dp1 or tpN:1d without mb"
        )
    return sizes.pop()


def num_rows(*trees: PyTree) -> int | None:
    """The samples of a batch, by its first tensor that has a dim, or else its first texts."""
    leaves = [pair for tree in trees for pair in held_leaves(tree)]
    lists_of_texts = [leaf for leaf, _ in leaves if is_texts(leaf)]
    return next(iter([*sizes_of(leaves), *map(len, lists_of_texts)]), None)


def kept_whole(tensor: Tensor) -> Tensor:
    """A view of a tensor [...] without samples, which no later cut of its batch divides.

    A part of a batch may have just as many samples as the tensor has rows.
    """
    if tensor.is_nested or tensor.layout is not torch.strided:
        return tensor
    view = tensor.view_as(tensor)
    setattr(view, WHOLE, True)
    return view


def is_whole(leaf: PyTree) -> bool:
    """Whether a leaf is a view that `kept_whole` has made."""
    return hasattr(leaf, WHOLE)


def cut_samples(
    batch: PyTree, part_of: Callable[[Tensor], Tensor], place: Callable[[int], slice]
) -> PyTree:
    """A part of a batch: `part_of` cuts tensors (samples, ...), `place` says where lists of as many
    texts, and each `SampleList`, are cut.

    Lists are never empty: one entry stands in where there is no sample. Tensors [] stay, as do
    tensors of other sizes in a dataclass or a namespace. A later cut of the part keeps these too.
    A tensor in two places is one tensor afterwards.
    """
    sizes = set(sizes_of(held_leaves(batch)))

    def part(leaf: PyTree, held: bool) -> PyTree:
        if isinstance(leaf, Tensor):
            if leaf.dim() == 0 or is_whole(leaf) or (held and len(sizes) > 1):
                return leaf
            return kept_whole(leaf) if held and sizes != {leaf.size(0)} else part_of(leaf)
        if is_per_sample(leaf) and sizes == {len(leaf)}:
            return entries_at(leaf, range(len(leaf))[place(len(leaf))])
        return leaf

    return map_held(once_each(part), batch)


def once_each(function: Callable[[PyTree, bool], PyTree]) -> Callable[[PyTree, bool], PyTree]:
    """The function of leaves of one batch, whose result for a tensor in two places is one object.

    A loss may take the gradient of an output by the inputs, which it finds in its targets.
    """
    made: dict[tuple[int, bool], PyTree] = {}

    def of_leaf(leaf: PyTree, held: bool) -> PyTree:
        if not isinstance(leaf, Tensor):
            return function(leaf, held)
        key = (id(leaf), held)
        if key not in made:
            made[key] = function(leaf, held)
        return made[key]

    return of_leaf


def joined(shares: Sequence[PyTree]) -> PyTree:
    """The batch of several shares, in their order.

    Tensors (samples, ...), each `SampleList` and lists of as many texts are joined. All else is the
    first share's, and shares without samples add none.
    """
    kept = [share for share in shares if num_rows(share)] or shares[:1]
    rows = [num_rows(share) for share in kept]

    def whole(parts: Sequence[PyTree], held: bool) -> PyTree:
        first = parts[0]
        sizes = [len(one) if is_per_sample(one) else None for one in parts]
        if isinstance(first, Tensor) and first.dim():
            stays = held and [one.size(0) for one in parts] != rows
            return first if stays else torch.cat(list(parts))
        return type(first)(chain(*parts)) if sizes == rows and rows != [None] else first

    columns = zip(*map(leaves_of, kept), strict=True)
    held = [is_held for _, is_held in held_leaves(kept[0])]
    return filled(kept[0], map(whole, columns, held))


def refuse_undivided(leaf: PyTree, num_samples: int) -> None:
    """Raise `DataError` for a leaf whose samples cannot be told apart, where they are divided."""
    if isinstance(leaf, Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise DataError(
                f"a batch has a {kind} tensor of {leaf.size(0) if leaf.dim() else 1} samples, "
                "which is not divided over ranks and micro-batches; give a dense one, such as "
                f"{'tensor.to_padded_tensor(0)' if leaf.is_nested else 'tensor.to_dense()'}, or "
                "give each rank its own batch without mb"
            )
        return
    values = dict(getattr(leaf, "__dict__", {}))
    for value in (*values.values(),):  # a graph keeps its tensors in a mapping
        values.update(value if isinstance(value, Mapping) else {})
    held = [
        str(name)
        for name, value in values.items()
        if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == num_samples
    ]
    if held and not isinstance(leaf, type | torch.nn.Module):
        raise DataError(
            f"a batch has a {type(leaf).__name__}, whose tensors ({', '.join(held[:4])}) are not "
            "divided over ranks and micro-batches; give a dict or a dataclass of them, register "
            "the class with torch.utils._pytree.register_pytree_node, or give a plait.SampleList "
            "of one such object for each sample, as for graphs"
        )


WHOLE = "plait_is_whole"
"""The attribute of a tensor that no cut divides."""

PLAIN = (int, float, bool, str, bytes, type(None), Tensor, list, tuple, dict)
"""Types that PyTorch knows, or that hold nothing."""


def _is_own(node: PyTree) -> bool:
    """Whether PyTorch would go wrong about a node, or not see what it holds."""
    return is_texts(node) or _entries(node) is not None


def _own_structure(node: PyTree, around: tuple[int, ...] = ()) -> Hashable:
    entries = None if id(node) in around else _entries(node)
    if entries is None:
        return None
    nodes, structure = tree_flatten(entries, is_leaf=_is_own)
    inner = (_own_structure(one, (*around, id(node))) for one in nodes)
    return type(node).__qualname__, structure, *inner


def _entries(node: PyTree) -> dict[str, PyTree] | None:
    """Values of a mapping or an object, by name; None for a leaf and for what PyTorch knows."""
    if type(node) in PLAIN or isinstance(node, Tensor | type) or not tree_is_leaf(node):
        return None
    if isinstance(node, Mapping):
        return dict(node)
    if is_dataclass(node):
        names = [field.name for field in fields(node)]
        return {name: getattr(node, name) for name in names if hasattr(node, name)}
    return dict(vars(node)) if isinstance(node, SimpleNamespace) else None


def _with_entries(node: PyTree, entries: dict[str, PyTree]) -> PyTree:
    """A copy that holds other values, without a call of its class."""
    if isinstance(node, Mapping):
        if not isinstance(node, dict | UserDict):
            return entries
        changed = copy.copy(node)
        changed.update(entries)
        return changed
    changed = copy.copy(node)
    for name, entry in entries.items():
        object.__setattr__(changed, name, entry)
    return changed
