"""Sees whether a loss compares the positions of a sequence with each other.

Under `cpN` a loss gets a part of each sequence. Its attention, its sums along the sequence, and its
shifts of labels by one then stay within that part.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.engine.loss_follower import CURVED, LIMITS, LossFollower, TorchCall
from plait.engine.mixed_losses import (
    BETWEEN,
    DIVISIONS,
    INVERSES,
    PRODUCTS_OF_NUMBERS,
    TURNS,
    VIEWS,
)
from plait.engine.notes import Notes
from plait.engine.sample_sums import KEEP_SUMS
from plait.values import PyTree

ATTENTION: Final = frozenset(
    {
        *("scaled_dot_product_attention", "multi_head_attention_forward"),
        *("transformer_encoder_layer_fwd", "native_multi_head_attention"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "ctc_loss"),
    }
)
"""Functions of whole sequences."""

ALONG: Final = frozenset(
    {
        *("softmax", "log_softmax", "logsumexp", "logcumsumexp", "cumsum", "cumprod", "sort"),
        *("std", "var", "std_mean", "var_mean", "roll", "flip", "diff", "argsort", "median"),
        *("max", "min", "amax", "amin", "argmax", "argmin", "topk", "prod"),
    }
)
"""Functions along a dim whose results are no sums of a number of each place."""

OF_CLASSES: Final = frozenset({"cross_entropy", "nll_loss"})
"""Functions whose second dim is that of classes."""

SUMS: Final = frozenset({"mean", "nanmean", "sum", "nansum"})

DIM_THIRD: Final = frozenset({"roll", "topk", "diff"})
"""Functions whose third argument is the dim."""

LAST_DIM: Final = frozenset({"sort", "argsort", "topk", "diff"})
"""Functions along the last dim where none is given."""

PRODUCTS: Final = frozenset({"matmul", "bmm", "einsum"})

SOME: Final = "getitem of some positions"
ONE: Final = "getitem of one position"

CUTS: Final = {"unbind": 1, "chunk": 2, "split": 2, "tensor_split": 2}
"""Functions that cut a tensor along a dim, with the place of that dim among their arguments."""

TOGETHER: Final = frozenset(
    {"cat", "concat", "stack", "hstack", "vstack", "add", "radd", "iadd", "setitem"}
)
"""Functions by which losses of pieces become one loss."""


class _Places(Enum):
    POSITIONS = auto()
    """Tensors [B, T, ...]; a view may have several numbers of each position side by side."""
    OF_SAMPLE = auto()
    """Tensors [T, ...] of one sample."""
    DERIVED = auto()
    """Positions are another dim than the second."""
    POOLED = auto()
    """Sums or means over the positions of each sample."""
    SUMMED = auto()
    """Sums over the positions of each sample, and means of these over samples."""


PLACES: Final = {_Places.POSITIONS: 1, _Places.OF_SAMPLE: 0}
"""Which dim is that of positions."""

OVER_POSITIONS: Final = (_Places.POOLED, _Places.SUMMED)


class MixedPositions(LossFollower[_Places]):
    """Follows outputs and targets [B, T, ...] of parts of sequences through a loss."""

    def __init__(self, output: PyTree, targets: PyTree) -> None:
        super().__init__()
        given = [one for one in tree_leaves((output, targets)) if isinstance(one, Tensor)]
        shaped = [one for one in given if one.dim() > 1 and not one.is_nested]
        shapes = (one.shape[:2] for one in shaped if one.is_floating_point())
        self._samples, self._positions = next(shapes, (0, 0))
        self._pieces = Notes[tuple[str, int, range]]()
        self._used: dict[tuple[str, int], set[range]] = {}
        self._is_scaled = False
        for leaf in shaped:
            if self._positions > 1 and leaf.shape[:2] == (self._samples, self._positions):
                self.known.add(leaf, _Places.POSITIONS)
        known = [leaf for leaf in shaped if leaf in self.known]
        self._are_sequences = len(known) > 1 or any(leaf.dim() > 2 for leaf in known)

    def is_number_of_samples(self, count: float | Tensor) -> bool:
        """Whether a count of a loss (0-dim) is that of the samples, each of several positions."""
        return self._are_sequences and float(count) == self._samples

    def found(self, loss: PyTree) -> str:
        """The name of a function that mixes positions and that a loss was computed by, if any.

        A loop may take each of the positions by itself, or piece by piece. A sum over
        positions may have factors that make it a mean. A loss of two numbers has its own count.
        """
        is_sum = isinstance(loss, Tensor) and self.known.get(loss) is _Places.SUMMED
        if is_sum and not self._is_scaled:
            return "sum"
        name = super().found(loss)
        used = [one for one in self._used.items() if one[0][0] == name]
        takes_all = bool(used) and all(_are_pieces(width, own) for (_, width), own in used)
        return "" if takes_all else name

    def look(self, call: TorchCall[_Places]) -> None:
        """Note what a function makes of positions [B, T, ...], which it may mix."""
        if not call.made:
            return
        is_product = call.name in DIVISIONS or call.name in PRODUCTS_OF_NUMBERS
        self._is_scaled = self._is_scaled or (is_product and len(call.kinds) == 1)
        mixing = self._mixing(call)
        if mixing:
            self.note_mixed(call.made, mixing)
            return
        for leaf in call.made:
            kind = self._kind_of(call, leaf)
            if kind is not None and leaf not in self.known:
                self.known.add(leaf, kind)

    def look_at_mixed(self, mixed: str, call: TorchCall[_Places]) -> str:
        """The function by which some positions meet others; `mixed` where none does."""
        tensors = call.tensors()
        known = [self._pieces.get(one) for one in tensors if one.dim()]
        pieces = [one for one in known if one is not None]
        for name, width, piece in pieces:
            self._used.setdefault((name, width), set()).add(piece)
        sure = [name for name in self.mixed_names(tensors) if name not in (SOME, ONE)]
        widths = {width for _, width, _ in pieces}
        if sure or len({(width, piece) for _, width, piece in pieces}) > len(widths):
            return next(iter(sure), mixed if call.name in TOGETHER else call.name)
        for leaf in call.made if pieces else ():
            self._pieces.add(leaf, pieces[0])
        return mixed

    def _mixing(self, call: TorchCall[_Places]) -> str:
        """The name of what mixes positions [B, T, ...] in a call, if anything surely does."""
        name = call.name
        if call.of(*OVER_POSITIONS):
            return name if _bends(call) else ""
        if self._is_of_whole_sequences(call):
            return name
        is_of_first = bool(call.args) and call.args[0] is call.first
        if call.kind not in PLACES or not is_of_first:
            return ""
        is_along = name in ALONG and _is_along_positions(call)
        is_of_classes = name in OF_CLASSES and call.kind is _Places.POSITIONS
        return name if is_along or is_of_classes else self._taking(call)

    def _is_of_whole_sequences(self, call: TorchCall[_Places]) -> bool:
        """Whether a function attends, recurs or slides along a sequence."""
        if call.name in ATTENTION:
            return self._positions in call.first.shape
        if call.name == "conv1d":
            weight = call.argument("weight")
            slides = isinstance(weight, Tensor) and weight.shape[-1] > 1
            return slides and call.first.shape[-1] == self._positions
        return call.name in PRODUCTS and self._is_square(call)

    def _is_square(self, call: TorchCall[_Places]) -> bool:
        """Whether a product has a number for each pair of positions."""
        made, size = call.made[0], (self._positions, self._positions)
        return len(call.kinds) > 1 and made.dim() > 2 and made.shape[-2:] == size

    def _taking(self, call: TorchCall[_Places]) -> str:
        """The name of what takes some positions of a tensor [..., T, ...], or one."""
        name, dims, place = call.name, call.first.dim(), PLACES[call.kind]
        if name == "getitem":
            return self._getting(call, _of_dim(call.args[1], dims, place))
        is_cut = name in CUTS
        if not is_cut and name not in ("select", "narrow", "index_select"):
            return ""
        dim = call.argument("dim", CUTS.get(name, 1))
        if (dim if isinstance(dim, int) else 0) % dims != place:
            return ""
        if is_cut:
            return self._cut(call, place)
        return self._getting(call, call.argument("index", 2)) if name == "select" else name

    def _getting(self, call: TorchCall[_Places], index: object) -> str:
        width = call.first.shape[PLACES[call.kind]]
        if isinstance(index, int) and not isinstance(index, bool):
            piece = range(index % width, index % width + 1)
        elif isinstance(index, slice):
            piece = range(*index.indices(width))
        else:
            return ""
        if isinstance(index, slice) and piece == range(width):
            return ""
        name = SOME if isinstance(index, slice) else ONE
        self._pieces.add(call.made[0], (name, width, piece))
        return name

    def _cut(self, call: TorchCall[_Places], place: int) -> str:
        start, width = 0, call.first.shape[place]
        name = ONE if call.name == "unbind" else SOME
        for leaf in call.made:
            end = start + (1 if name == ONE else leaf.shape[place])
            self._pieces.add(leaf, (name, width, range(start, end)))
            start = end
        return name if len(call.made) > 1 else ""

    def _kind_of(self, call: TorchCall[_Places], made: Tensor) -> _Places | None:
        name, kind = call.name, call.kind
        if kind in OVER_POSITIONS:
            stays = kind is _Places.SUMMED and (name in KEEP_SUMS or name in SUMS)
            return _Places.SUMMED if stays else _Places.POOLED
        if not made.dim():
            return None
        is_sum = kind is _Places.POSITIONS and name in SUMS
        if is_sum and _is_along_positions(call):
            return _Places.SUMMED if name == "sum" else _Places.POOLED
        if self._is_of_sample(call, made):
            return _Places.OF_SAMPLE
        if self._is_second(call, made):
            return _Places.POSITIONS
        return _Places.DERIVED if self._positions in made.shape else None

    def _is_of_sample(self, call: TorchCall[_Places], made: Tensor) -> bool:
        """Whether the first dim of a result is that of positions, as in one of the samples."""
        if call.kind is _Places.OF_SAMPLE:
            return call.name not in TURNS and len(made) == len(call.first)
        takes_one = call.name in ("unbind", "select") or (
            call.name == "getitem" and isinstance(_of_dim(call.args[1], call.first.dim(), 0), int)
        )
        is_whole = takes_one and made.dim() == call.first.dim() - 1
        return call.kind is _Places.POSITIONS and is_whole and len(made) == call.first.shape[1]

    def _is_second(self, call: TorchCall[_Places], made: Tensor) -> bool:
        """Whether the second dim of a result is that of positions."""
        if made.dim() < 2 or made.shape[0] != self._samples:
            return False
        name, width = call.name, made.shape[1]
        if call.kind is _Places.POSITIONS:
            is_folded = name in VIEWS and width % self._positions == 0
            return name not in TURNS and (is_folded or width == call.first.shape[1])
        is_beside = bool(call.of(_Places.POSITIONS))
        return width == self._positions and (name in TURNS or is_beside)


def _bends(call: TorchCall[_Places]) -> bool:
    """Whether a function of means over positions is no mean over positions any more."""
    name, args, pooled = call.name, call.args, call.of(*OVER_POSITIONS)
    if name in DIVISIONS and len(args) > 1:
        return any(args[1] is one for one in pooled)
    if name in BETWEEN and len(call.kinds) > 1:
        are_two = len(pooled) > 1 and name.endswith(("mul", "multiply"))
        return are_two or bool(call.of(_Places.POSITIONS))
    is_limited = name in LIMITS and call.made[0].requires_grad
    return is_limited or name in CURVED or name in INVERSES


def _are_pieces(width: int, pieces: Collection[range]) -> bool:
    """Whether slices of so many positions follow each other, all of one length but the last."""
    size = max(map(len, pieces))
    starts = range(0, width, max(size, 1))
    return pieces == {range(start, min(start + size, width)) for start in starts}


def _is_along_positions(call: TorchCall[_Places]) -> bool:
    """Whether a function is asked for some dims, of which one is that of positions."""
    given = call.args[2:] if call.name in DIM_THIRD else call.args[1:]
    dim = call.named.get("dim", call.named.get("dims", given))
    dims = [one for one in tree_leaves(dim) if isinstance(one, int) and not isinstance(one, bool)]
    if not dims and call.name in LAST_DIM:
        dims = [-1]
    return any(one % call.first.dim() == PLACES[call.kind] for one in dims)


def _of_dim(index: object, dims: int, place: int) -> object:
    """The part of an index of a tensor [...] that is for the dim at a place."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(one, Tensor) and one.dtype.itemsize == 1 for one in parts):
        return None  # a mask may take several dims
    given = [one for one in parts if one is not None and one is not Ellipsis]
    if Ellipsis in [one for one in parts if not isinstance(one, Tensor)]:
        left_out = next(i for i, one in enumerate(parts) if one is Ellipsis)
        before = [one for one in parts[:left_out] if one is not None]
        given = [*before, *[slice(None)] * (dims - len(given)), *given[len(before) :]]
    return given[place] if len(given) > place else None
