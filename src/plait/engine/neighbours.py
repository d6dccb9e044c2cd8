"""Sees whether a loss compares samples with others that stand elsewhere in the batch.

Such are `output[1:]` and `output[:-1]`, the halves of a batch, or samples in another order. A part
of a batch has other neighbours. Blocks of neighbours, as pairs that follow each other, are not told
of: they may stay whole in each part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.engine.loss_follower import CURVED, LIMITS, LossFollower, TorchCall
from plait.torch_internals import has_function_transforms
from plait.values import PyTree

MOST: Final = 256
"""Samples of a batch above which no order is followed, as that would take seconds."""

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


@dataclass(frozen=True)
class Rows:
    """The samples that the rows of a tensor [...] are of.

    Attributes:
        samples: the places in the batch of the samples that each row was computed of.
        is_one: whether the tensor is a row itself, and has no dim of rows.
    """

    samples: tuple[frozenset[int], ...]
    is_one: bool = False


class Neighbours(LossFollower[Rows]):
    """Follows outputs and targets of a micro-batch [B, ...] through a loss."""

    def __init__(self, output: PyTree, targets: PyTree) -> None:
        super().__init__()
        rows = next((len(one) for one in _with_rows(targets)), 0)
        whole = Rows(tuple(frozenset({place}) for place in range(rows)))
        self._size = rows
        for leaf in _with_rows((output, targets)) if 2 < rows <= MOST else ():
            has_heads = leaf.dim() > 1 and leaf.is_floating_point() and leaf.shape[1] == rows
            if len(leaf) == rows and not has_heads:
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
        rows = call.kind
        for made, places in _moved(call):
            moved = Rows(tuple(rows.samples[place] for place in places), is_one=_takes_one(call))
            self.known.add(made, moved)
        if call.name not in KEEPING or _is_along(call) or not call.made:
            return
        made = call.made[0]
        if call.name in CURVED and any(len(one) > 1 for one in rows.samples):
            self._meet(call, rows.samples)
        elif made in self.known or rows.is_one or _chooses(call):
            return
        elif made.dim() and len(made) == len(rows.samples):
            self.known.add(made, rows)

    def _join(self, call: TorchCall[Rows]) -> None:
        """Note of which samples the rows of several tensors behind each other are."""
        joined = [one for _, rows in call.kinds for one in rows.samples]
        if call.made and len(call.made[0]) == len(joined):
            self.known.add(call.made[0], Rows(tuple(joined)))

    def _look_at_several(self, call: TorchCall[Rows]) -> None:
        """Look at a function of numbers side by side."""
        tensors = [tensor for tensor, _ in call.kinds]
        kinds = [rows for _, rows in call.kinds]
        are_one = all(rows.is_one for rows in kinds)
        if are_one and (not tensors[0].dim() or call.name in ("add", "radd")):
            return  # a sum of the losses of samples
        lengths = {len(rows.samples) for rows in kinds if not rows.is_one}
        if len(lengths) > 1 or not call.made:
            return
        number = lengths.pop() if lengths else 1
        sides = [rows.samples * number if rows.is_one else rows.samples for rows in kinds]
        samples = tuple(frozenset().union(*each) for each in zip(*sides, strict=True))
        made = call.made[0]
        if call.name not in LINEAR:
            is_equal = all(side == sides[0] for side in sides)
            if not is_equal or any(len(one) > 1 for one in samples):
                self._meet(call, samples)
                return
        if are_one or (made.dim() and len(made) == number):
            self.known.add(made, Rows(samples, is_one=are_one))

    def _meet(self, call: TorchCall[Rows], samples: Sequence[frozenset[int]]) -> None:
        """Note that samples met, if no blocks of neighbours have them together."""
        spans = [(min(one), max(one)) for one in samples if one]
        next_ones = {low for low, high in spans if high == low + 1}
        is_far = any(2 * (high - low) >= self._size for low, high in spans)
        if is_far or len(next_ones) == self._size - 1:
            self.note_mixed(call.made, call.name)


def _with_rows(given: PyTree) -> Iterator[Tensor]:
    """The tensors [B, ...] of a nesting that may have a row for each sample."""
    for leaf in tree_leaves(given):
        is_given = isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
        if is_given and leaf.layout is torch.strided and not leaf.is_nested and leaf.dim():
            yield leaf


def _moved(call: TorchCall[Rows]) -> Iterator[tuple[Tensor, list[int]]]:
    """The results whose rows stand elsewhere, with the places where they stood."""
    source, rows = call.kinds[0]
    if rows.is_one or call.args[0] is not source:
        return
    places = torch.arange(len(rows.samples))
    dim = call.argument("dims" if call.name in ("flip", "roll") else "dim", _place_of_dim(call))
    dims = [one % source.dim() for one in tree_leaves(dim) if isinstance(one, int)]
    if call.name in PARTS and dims in ([], [0]):
        sizes = [1 if call.name == "unbind" else len(one) for one in call.made]
        yield from zip(call.made, [one.tolist() for one in places.split(sizes)], strict=True)
        return
    moved: Tensor | None = None
    if call.name == "getitem" and (index := _chosen(call)) is not None:
        moved = places[index]
    elif call.name == "index_select" and dims == [0]:
        moved = places[call.argument("index", 2).cpu()]
    elif call.name == "flip" and 0 in dims:
        moved = places.flip(0)
    elif call.name == "roll" and dims == [0]:
        moved = places.roll(next(iter(tree_leaves(call.argument("shifts")))))
    if moved is not None and call.made and moved.dim() < 2:
        made = call.made[0]
        if not moved.dim() or (made.dim() and len(made) == len(moved)):
            yield made, moved.reshape(-1).tolist()


def _place_of_dim(call: TorchCall[Rows]) -> int:
    """The place of the dim among the arguments."""
    return 2 if call.name in ("chunk", "split", "tensor_split", "roll") else 1


def _chosen(call: TorchCall[Rows]) -> Any:
    """The index by which a function takes some of the samples, or their order; None of others.

    Slices with steps take a sample of each block.
    """
    index = call.args[1]
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, slice):
        is_whole = first == slice(None) or first.step not in (None, 1)
        return None if is_whole else first
    if isinstance(first, Tensor):
        is_index = first.dtype in (torch.int64, torch.int32, torch.bool) and first.dim() == 1
        return first.detach().cpu() if is_index else None
    is_number = isinstance(first, int) and not isinstance(first, bool)
    return first if is_number or isinstance(first, list) else None


def _chooses(call: TorchCall[Rows]) -> bool:
    """Whether a function takes some samples of the tensor that is known, or their order."""
    is_source = call.name == "getitem" and call.args[0] is call.first
    return is_source and _chosen(call) is not None


def _takes_one(call: TorchCall[Rows]) -> bool:
    """Whether results are single samples without a dim of rows."""
    if call.name == "unbind":
        return True
    return call.name == "getitem" and isinstance(_chosen(call), int)


def _is_along(call: TorchCall[Rows]) -> bool:
    """Whether a function works along the samples, or over all numbers."""
    if call.name in ("view", "reshape", "flatten", "getitem", "one_hot", "linear"):
        return False
    dim = call.named.get("axis", call.argument("dim", 1))
    dims = [one for one in tree_leaves(dim) if isinstance(one, int)]
    has_dim = call.name in ("mean", "sum", "softmax", "log_softmax", "var", "std", "logsumexp")
    return has_dim and any(one % max(call.first.dim(), 1) == 0 for one in dims)
