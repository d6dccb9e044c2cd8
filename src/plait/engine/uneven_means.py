"""Sees whether a loss is a mean over what samples have unequal numbers of.

A mean over unmasked places, or over weights, is such a one. Over the parts of a batch it becomes a
mean of means. Each part should count by the sum of its mask instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plait.batch_trees import leaves_of, tensors_of
from plait.engine.notes import Notes
from plait.torch_internals import has_function_transforms
from plait.values import PyTree

SUMS: Final = frozenset({"sum", "mean", "nanmean", "count_nonzero"})
"""Functions that make one number of a mask or of weights."""

DIVISIONS: Final = frozenset({"div", "divide", "truediv", "itruediv", "true_divide"})

RESHAPES: Final = frozenset({"view", "reshape", "flatten", "ravel"})
"""Functions that may join the rows of samples with other dims."""

PLACES: Final = frozenset({"nonzero", "argwhere", "where"})
"""Functions that give the places of a mask by numbers."""

CHOICES: Final = frozenset(
    {"getitem", "masked_select", "index_select", "take", "take_along_dim", "gather"}
)
"""Functions that choose by a mask or by places."""

VALUES: Final = frozenset({"item", "int", "float", "index"})
READS: Final = VALUES | {"len", "numel", "size"}
"""Functions whose results are numbers of Python."""


class UnevenMeans(TorchFunctionMode):
    """Follows masks and weights [B, ...] of samples while a loss is computed.

    They come from the outputs or the targets. Constants may have as many rows, as weights of tasks.

    Attributes:
        of_classes: whether there was a mean whose classes have different weights.
        of_places: whether there was a mean over a mask, or over weights, of which samples have
            different sums.
    """

    def __init__(self, output: PyTree, targets: PyTree, *, cuts_sequences: bool = False) -> None:
        super().__init__()
        self.of_classes = False
        self.of_places = False
        self._cuts_sequences = cuts_sequences
        self._of_batch = Notes[int]()  # the samples that rows are of; 0 where that is not known
        leaves = [leaf for leaf in leaves_of((output, targets)) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            self._of_batch.add(leaf, leaf.size(0) if leaf.dim() else 0)
        self._sizes = {leaf.shape[0] for leaf in tensors_of(output) if leaf.dim()}
        self._counts = Notes[bool]()
        self._places = Notes[bool]()
        self._has_places = False
        self._selected = Notes[bool]()
        self._numbers_read: set[float] = set()
        self._counts_read: set[float] = set()

    def is_of_batch(self, count: float | Tensor) -> bool:
        """Whether a count (0-dim) was computed from numbers of outputs or targets."""
        if isinstance(count, Tensor):
            return count in self._of_batch
        return count in self._numbers_read

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and look at the masks and weights that it reads."""
        named = dict(kwargs or {})
        result = function(*args, **named)
        if has_function_transforms():  # numbers are not read inside torch.func.vmap
            return result
        name = getattr(function, "__name__", "").strip("_")
        is_shape = function == Tensor.shape.__get__  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunction():
            self._look_at_classes(function, named)
            self._note_places(name, args, named, result)
            if isinstance(result, Tensor):
                self._look_at_places(name, args, named, result)
            elif name in READS or is_shape:
                self._look_at_numbers(name, args[0], result)
            elif isinstance(result, tuple | list):  # such as values and places of a maximum
                given = tensors_of((args, named))
                if any(leaf in self._of_batch for leaf in given):
                    for leaf in tensors_of(result):
                        self._of_batch.add(leaf, self._samples(name, given, leaf))
        return result

    def _look_at_classes(self, function: Callable[..., Any], named: Mapping[str, Any]) -> None:
        if function in (F.cross_entropy, F.nll_loss) and named.get("reduction", "mean") == "mean":
            weight = named.get("weight")
            if isinstance(weight, Tensor) and bool(weight.min() != weight.max()):
                self.of_classes = True

    def _look_at_numbers(self, name: str, source: Tensor, read: PyTree) -> None:
        """Note the number of Python, or the first dim, that a tensor [...] was read as."""
        first = next(iter(tree_leaves(read)), None)
        numbers = {float(first)} if isinstance(first, int | float) else set()
        if name in VALUES and source in self._of_batch:
            self._numbers_read |= numbers
        if any(source in notes for notes in (self._counts, self._selected, self._places)):
            self._counts_read |= numbers

    def _look_at_places(
        self, name: str, args: Sequence[Any], named: Mapping[str, Any], result: Tensor
    ) -> None:
        given_tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        if any(leaf in self._of_batch for leaf in given_tensors):
            self._of_batch.add(result, self._samples(name, given_tensors, result))
        if name in DIVISIONS and self._is_count(args[1:]) and given_tensors[0].requires_grad:
            self.of_places = True
        if any(leaf in self._selected for leaf in given_tensors):
            if result.dim():
                self._selected.add(result, True)
            elif name not in ("sum", "numel") and named.get("reduction", "mean") == "mean":
                self.of_places = self.of_places or result.requires_grad
        elif self._selects(name, args, named):
            self._selected.add(result, True)
        elif name in SUMS and not result.dim() and self._is_uneven(given_tensors[0]):
            self._counts.add(result, True)
        elif not result.dim() and any(leaf in self._counts for leaf in given_tensors):
            if (
                name in DIVISIONS
                and given_tensors[0] not in self._counts
                and given_tensors[0].requires_grad
            ):
                self.of_places = True
            elif not result.requires_grad:
                self._counts.add(result, True)

    def _is_count(self, divisors: Sequence[Any]) -> bool:
        """Whether a divisor is a number that was read from a count of unequal parts."""
        return any(isinstance(one, int | float) and one in self._counts_read for one in divisors)

    def _selects(self, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        """Whether a function takes unequal numbers of places from the samples of a batch."""
        if name not in CHOICES:
            return False
        chosen = [leaf for leaf in tree_leaves((args[1:], named)) if isinstance(leaf, Tensor)]
        masks = [leaf for leaf in chosen[:1] if leaf.dtype == torch.bool]
        return any(leaf in self._places for leaf in chosen) or any(map(self._is_uneven, masks))

    def _note_places(
        self, name: str, args: Sequence[Any], named: Mapping[str, Any], result: PyTree
    ) -> None:
        """Note the places of an uneven mask, and numbers that are made of such places."""
        if not (self._has_places or name in PLACES):
            return
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        is_asked = name in PLACES and not (name == "where" and len(args) + len(named) > 1)
        if (is_asked and self._is_uneven(given[0], given[0] != 0)) or any(
            leaf in self._places for leaf in given
        ):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.dtype == torch.int64:
                    self._places.add(leaf, True)
                    self._has_places = True

    def _samples(self, name: str, given: Sequence[Tensor], result: Tensor) -> int:
        """The samples that the rows of a result [rows, ...] are of; 0 where that is not known."""
        for leaf in given:
            samples = self._of_batch.get(leaf)
            if samples and result.dim() and leaf.dim():
                is_joined = name in RESHAPES and result.numel() == leaf.numel()
                rows = result.size(0)
                if rows == leaf.size(0) or (is_joined and rows % samples == 0):
                    return samples
        return 0

    def _is_uneven(self, places: Tensor, counted: Tensor | None = None) -> bool:
        """Whether samples have different sums of a mask or of weights [B, ...] or [B * n, ...].

        `counted` are other numbers in their places.
        """
        numbers = places if counted is None else counted
        samples = self._of_batch.get(places)
        if places.is_nested or places.layout is not torch.strided or not places.dim():
            return False
        if samples is not None and places.shape[0] in self._sizes:
            samples = places.shape[0]
        if not samples or places.requires_grad or not places.numel():
            return False
        if self._cuts_sequences and places.dim() > 1 and bool((numbers != 1).any()):
            return True  # another part of the sequences may have another sum
        sums = numbers.reshape(samples, -1).sum(1)
        return bool((sums != sums[0]).any())
