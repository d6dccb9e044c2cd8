"""Sees whether a loss compares samples with others that stand elsewhere in the batch.

Such are `output[1:]` and `output[:-1]`, the halves of a batch, or samples in another order. A part
of a batch has other neighbours. Blocks of neighbours, as pairs that follow each other, are not told
of: they may stay whole in each part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.engine.loss_follower import CURVED, LIMITS, LossFollower, TorchCall
from plait.torch_internals import has_function_transforms
from plait.values import PyTree

LINEAR: Final = frozenset({"add", "radd", "sub", "rsub", "subtract"})

MEETINGS: Final = frozenset(
    {
        *("mul", "rmul", "multiply", "div", "divide", "truediv", "true_divide", *LIMITS),
        *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "logical_and", "logical_or", "dot"),
        *("cosine_similarity", "pairwise_distance", "mse_loss", "l1_loss", "smooth_l1_loss"),
        *("huber_loss", "kl_div", "cross_entropy", "nll_loss", "binary_cross_entropy"),
        *("binary_cross_entropy_with_logits", "triplet_margin_loss", "cosine_embedding_loss"),
    }
)
"""Functions of numbers side by side that are no sums of them."""

KEEPING: Final = frozenset(
    {
        *(*CURVED, *MEETINGS, "neg", "detach", "clone", "contiguous", "to", "float", "double"),
        *("long", "int", "mean", "sum", "view", "reshape", "flatten", "squeeze", "argmax"),
        *("linear", "getitem", "one_hot", "var", "std", "logsumexp"),
    }
)
"""Functions that leave samples where they are, unless they work along them."""

PARTS: Final = frozenset({"chunk", "split", "tensor_split", "unbind"})

COPIES: Final = frozenset({"detach", "clone", "contiguous", "to", "float", "double"})
"""Functions whose results are the numbers that they got."""

Places = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Rows:
    """The samples that the rows of a tensor [...] are of.

    Attributes:
        first: the first place in the batch of the samples that each row was computed of, [rows].
        last: the last one, [rows].
        is_one: whether the tensor is a row itself, and has no dim of rows.
    """

    first: Places
    last: Places
    is_one: bool = False

    @property
    def are_mixed(self) -> bool:
        """Whether a row was computed of several samples."""
        return self.first is not self.last and bool((self.first != self.last).any())

    def at(self, places: Any) -> Rows:
        """The samples of some rows, or of rows in another order."""
        first = np.atleast_1d(self.first[places])
        last = first if self.last is self.first else np.atleast_1d(self.last[places])
        return Rows(first, last, is_one=np.ndim(self.first[places]) == 0)

    def equals(self, other: Rows) -> bool:
        """Whether each row is of the same samples as the row beside it, or the only one there."""
        if self.first is other.first and self.last is other.last:
            return True
        return bool((self.first == other.first).all() and (self.last == other.last).all())


def together(sides: list[Rows]) -> Rows:
    """The rows of what is computed of tensors side by side. One row stands beside every other."""
    most = max(sides, key=lambda rows: len(rows.first))
    if all(rows.equals(most) for rows in sides):
        return most
    first, last = most.first, most.last
    for rows in sides:
        first, last = np.minimum(first, rows.first), np.maximum(last, rows.last)
    return Rows(first, last)


class Neighbours(LossFollower[Rows]):
    """Follows outputs and targets of a micro-batch [B, ...] through a loss."""

    def __init__(self, output: PyTree, targets: PyTree) -> None:
        super().__init__()
        self._size = next((len(one) for one in _with_rows(targets)), 0)
        places = np.arange(self._size)
        whole = Rows(places, places)
        for leaf in _with_rows((output, targets)) if self._size > 2 else ():
            has_heads = leaf.dim() > 1 and leaf.is_floating_point() and leaf.shape[1] == len(places)
            if len(leaf) == len(places) and not has_heads:
                self.known.add(leaf, whole)

    def look(self, call: TorchCall[Rows]) -> None:
        """Note of which samples the results are, or that others met them."""
        if has_function_transforms() or call.name in ("setitem", "size", "len"):
            return
        if len(call.kinds) == 1 or call.name == "getitem":
            self._look_at_one(call)
        elif call.name == "cat" and call.argument("dim") in (None, 0):
            self._join(call)
        elif call.name in LINEAR or call.name in MEETINGS:
            self._look_at_several(call)

    def _look_at_one(self, call: TorchCall[Rows]) -> None:
        for made, places in _moved(call):
            self.known.add(made, call.kind.at(places))
        if call.name not in KEEPING or _is_along(call) or not call.made:
            return
        rows, made = _class_of(call) or call.kind, call.made[0]
        if call.name in CURVED and rows.are_mixed:
            self._meet(call, rows)
        elif made in self.known or _chooses(call) or (rows.is_one and call.name not in COPIES):
            return
        elif rows.is_one or (made.dim() and len(made) == len(rows.first)):
            self.known.add(made, rows)

    def _join(self, call: TorchCall[Rows]) -> None:
        """Note of which samples the rows of several tensors behind each other are."""
        first = np.concatenate([rows.first for _, rows in call.kinds])
        last = np.concatenate([rows.last for _, rows in call.kinds])
        if call.made and len(call.made[0]) == len(first):
            self.known.add(call.made[0], Rows(first, last))

    def _look_at_several(self, call: TorchCall[Rows]) -> None:
        """Look at a function of numbers side by side."""
        sides = [rows for _, rows in call.kinds]
        are_one = all(rows.is_one for rows in sides)
        if are_one and (not call.first.dim() or call.name in ("add", "radd")):
            return  # a sum of the losses of samples
        if not call.made or len({len(rows.first) for rows in sides} - {1}) > 1:
            return
        rows, made = together(sides), call.made[0]
        if call.name not in LINEAR:
            is_equal = all(side.equals(sides[0]) for side in sides)
            if not is_equal or rows.are_mixed:
                self._meet(call, rows)
                return
        if are_one or (made.dim() and len(made) == len(rows.first)):
            self.known.add(made, rows)

    def _meet(self, call: TorchCall[Rows], rows: Rows) -> None:
        """Note that samples met, if no blocks of neighbours have them together."""
        if not len(rows.first):
            return
        order = np.argsort(rows.first, kind="stable")
        first, last = rows.first[order], np.maximum.accumulate(rows.last[order])
        is_far = (2 * (rows.last - rows.first) >= self._size).any()
        is_chain = first[0] == 0 and last[-1] == self._size - 1 and (first[1:] <= last[:-1]).all()
        if is_far or is_chain:
            self.note_mixed(call.made, call.name)


def _with_rows(given: PyTree) -> Iterator[Tensor]:
    """The tensors [B, ...] of a nesting that may have a row for each sample."""
    for leaf in tree_leaves(given):
        is_given = isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
        if is_given and leaf.layout is torch.strided and not leaf.is_nested and leaf.dim():
            yield leaf


def _moved(call: TorchCall[Rows]) -> Iterator[tuple[Tensor, Any]]:
    """The results whose rows stand elsewhere, with the places where they stood."""
    source, rows = call.kinds[0]
    if rows.is_one or call.args[0] is not source:
        return
    if call.name in PARTS:
        yield from _parts(call)
        return
    places = np.arange(len(rows.first))
    moved: Any = None
    if call.name == "getitem" and (index := _chosen(call)) is not None:
        moved = places[index]
    elif call.name == "index_select" and _dims(call, "dim", slice(1, 2)) == [0]:
        moved = places[_read(call.argument("index", 2))]
    elif call.name == "narrow" and _dims(call, "dim", slice(1, 2)) == [0]:
        start, length = int(call.argument("start", 2)), int(call.argument("length", 3))
        moved = places[start % len(places) :][:length]
    elif call.name == "flip" and 0 in _dims(call, "dims", slice(1, None)):
        moved = places[::-1]
    elif call.name == "roll":
        dims = _dims(call, "dims", slice(2, 3)) or [0] * (source.dim() == 1)
        shifts = zip(dims, tree_leaves(call.argument("shifts")), strict=False)
        turned = [int(shift) for dim, shift in shifts if dim == 0]
        moved = np.roll(places, turned[0]) if turned else None
    if moved is not None and call.made and np.ndim(moved) < 2:
        made = call.made[0]
        if not np.ndim(moved) or (made.dim() and len(made) == len(moved)):
            yield made, moved


def _parts(call: TorchCall[Rows]) -> Iterator[tuple[Tensor, Any]]:
    """The parts of samples behind each other, with the places where they stood."""
    place = 1 if call.name == "unbind" else 2
    if _dims(call, "dim", slice(place, place + 1)) not in ([], [0]):
        return
    if call.name == "unbind":
        yield from zip(call.made, range(len(call.made)), strict=True)
        return
    start = 0
    for made in call.made:
        yield made, slice(start, start + len(made))
        start += len(made)


def _dims(call: TorchCall[Rows], name: str, places: slice) -> list[int]:
    """The dims along which a function works, by the name of the argument or its place."""
    given = call.named.get(name, call.args[places])
    return [one % call.first.dim() for one in tree_leaves(given) if isinstance(one, int)]


def _chosen(call: TorchCall[Rows]) -> Any:
    """The index by which a function takes some of the samples, or their order; None of others.

    Slices with steps take a sample of each block.
    """
    index = _first_index(call)
    if isinstance(index, slice):
        is_whole = index == slice(None) or index.step not in (None, 1)
        return None if is_whole else index
    if isinstance(index, Tensor | np.ndarray):
        return None if _class_of(call) or index.ndim != 1 else _read(index)
    is_number = isinstance(index, int) and not isinstance(index, bool)
    is_list = isinstance(index, list) and all(isinstance(one, int) for one in index)
    return index if is_number or is_list else None


def _first_index(call: TorchCall[Rows]) -> Any:
    """The index of the first dim."""
    index = call.args[1]
    return index[0] if isinstance(index, tuple) and index else index


def _class_of(call: TorchCall[Rows]) -> Rows | None:
    """The rows of classes by which a table is read.

    Numbers that a batch has are such: places of samples would be wrong in a part of it.
    """
    index = _first_index(call) if call.name == "getitem" else None
    of_index = (rows for one, rows in call.kinds if one is index and one.dtype is not torch.bool)
    return next(of_index, None)


def _read(index: Tensor | np.ndarray[Any, Any]) -> Any:
    """The numbers of an index, which may be a mask; None of others."""
    if isinstance(index, Tensor):
        is_index = index.dtype in (torch.int64, torch.int32, torch.bool)
        return index.detach().cpu().numpy() if is_index else None
    return index


def _chooses(call: TorchCall[Rows]) -> bool:
    """Whether a function takes some samples of the tensor that is known, or their order."""
    is_source = call.name == "getitem" and call.args[0] is call.first
    return is_source and _chosen(call) is not None


def _is_along(call: TorchCall[Rows]) -> bool:
    """Whether a function works along the samples, or over all numbers."""
    if call.name in ("view", "reshape", "flatten", "getitem", "one_hot", "linear"):
        return False
    dim = call.named.get("axis", call.argument("dim", 1))
    dims = [one for one in tree_leaves(dim) if isinstance(one, int)]
    has_dim = call.name in ("mean", "sum", "softmax", "log_softmax", "var", "std", "logsumexp")
    return has_dim and any(one % max(call.first.dim(), 1) == 0 for one in dims)
