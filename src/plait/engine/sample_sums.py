"""Sees whether a loss that is one number is a sum over samples, such as `reduction="sum"`.

One number counts as the mean over the samples. A sum is then divided by the parts of a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plait.engine.loss_follower import is_of_a_distribution
from plait.engine.norms import is_square, order_of_norm
from plait.engine.notes import Notes
from plait.values import PyTree

MEANS = ("mean", "nanmean")

DIVISIONS = ("div", "divide", "truediv", "itruediv", "true_divide")

AVERAGES = (*MEANS, *DIVISIONS, "rtruediv")
"""Names of functions after which a sum may be a mean over samples."""

PRODUCTS = ("mul", "multiply", "rmul", "imul")
"""Names of products. A mask is no weight that adds up to one."""

SUMS_OF_PRODUCTS = ("dot", "vdot", "inner", "matmul", "rmatmul", "einsum", "tensordot")
"""Names of functions that multiply numbers side by side and add up, where one number is left."""

CLOSE = 1e-3
"""How far weights may be from adding up to one."""

SCALES = (*PRODUCTS, *DIVISIONS)
"""Names of functions by which a sum stays one, if the number knows nothing of the batch's size."""

CONVERSIONS = ("float", "double", "half", "bfloat16", "int", "long", "to", "type", "type_as")
"""Names of functions that leave a mask of whole numbers a mask."""

PLACE_OF_DIM = {"unbind": 1, "select": 1, "chunk": 2, "split": 2, "tensor_split": 2}
"""Functions that give parts along a dim, and the place of that dim among their arguments."""

NO_DIVISIONS = (
    *("getitem", "gather", "squeeze", "unsqueeze", "view", "reshape", "flatten", "detach"),
    *("add", "radd", "sub", "rsub", "neg"),
)
"""Names of functions that divide by no number of samples."""

DIMS = ("dim", "ndim", "ndimension")

KEEP_SUMS = ("add", "radd", "iadd", "sub", "rsub", "isub", "neg")
"""Names of functions by which a sum over samples stays one."""


class SampleSums(TorchFunctionMode):
    """Follows the output of a model through a loss, up to sums over its samples."""

    def __init__(self, output: PyTree, targets: PyTree = None) -> None:
        super().__init__()
        given = [leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor)]
        self._rows = {leaf.size(0) for leaf in given if leaf.dim()}
        self._places = Notes[int]()
        self._outputs = Notes[bool]()
        self._averaged = Notes[bool]()
        self._sums = Notes[bool]()
        self._roots = Notes[bool]()
        self._weights = Notes[Tensor]()
        self._undivided = Notes[bool]()
        self._mask_versions = Notes[int]()
        self._sizes: set[int] = set()
        self._is_turned = False
        self._has_shapes = False  # of a distribution, which tells them
        self._knows_sizes = _has_lists((output, targets))
        for leaf in given:
            self._undivided.add(leaf, True)
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim()]
        rows = {leaf.size(0) for leaf in made[:1]} | self._rows
        for leaf in made:
            if not isinstance(leaf, nn.Parameter) and _has_rows(leaf, rows):
                if leaf.requires_grad:
                    self._undivided.add(leaf, True)
                self._outputs.add(leaf, True)
                self._sizes.add(leaf.size(0))

    def has(self, loss: Tensor) -> bool:
        """Whether a loss (0-dim) is a sum over samples, with or without other terms."""
        return loss in self._sums

    def is_of_one_sample(self, numbers: Tensor) -> bool:
        """Whether numbers [...] are of one sample, which the loss took by itself."""
        return numbers in self._places

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and note what its result is."""
        named = dict(kwargs or {})
        given_tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        is_output = any(leaf in self._outputs for leaf in given_tensors)
        is_averaged = any(leaf in self._averaged for leaf in given_tensors)
        is_sum = any(leaf in self._sums for leaf in given_tensors)
        result = function(*args, **named)
        name = getattr(function, "__name__", "").strip("_")
        is_inside = is_of_a_distribution(sys._getframe(1))
        self._note_sizes(name, args, named, result, is_inside)
        self._follow_undivided(name, given_tensors, result)
        scales = name in SCALES and not self._knows_sizes and _has_one_tensor(args)
        scales = scales and not (self._has_shapes and self._is_by_samples(args))
        keeps_sums = name in KEEP_SUMS or scales
        if is_sum and not keeps_sums and isinstance(result, Tensor):
            self._sums.discard(result)  # divided in place
        if is_output:
            self._is_turned = self._is_turned or _turns(given_tensors[0], result)
            is_dot = name in SUMS_OF_PRODUCTS and _is_one_number(result, given_tensors)
            with torch._C.DisableTorchFunction():
                if name in AVERAGES:
                    is_by_its_scale = is_inside and name in DIVISIONS
                    averages = not is_by_its_scale and self._averages(name, args, named, result)
                else:
                    is_product = is_dot or name in PRODUCTS
                    averages = is_product and self._weighs(given_tensors, result)
            is_averaged = is_averaged or (averages and not scales)
            with torch._C.DisableTorchFunction():
                order = 0 if is_averaged else order_of_norm(name, args, named)
            adds_up = named.get("reduction") == "sum" or (
                name in ("sum", "nansum") and not is_averaged
            )
            adds_up = adds_up or order == 1 or (is_dot and not is_averaged)
            if order == 2 and isinstance(result, Tensor):
                self._roots.add(result, True)
            self._note(result, is_averaged=is_averaged, adds_up=adds_up)
            if not adds_up:
                self._note_entries(name, args, given_tensors, result)
        elif (is_sum and keeps_sums) or (is_square(name, args) and args[0] in self._roots):
            self._sums.add(result, True)
        elif any(leaf in self._places for leaf in given_tensors):
            self._follow_entries(name, given_tensors, result)
        elif isinstance(result, Tensor):
            if name in CONVERSIONS and given_tensors and self._is_mask(given_tensors[0]):
                self._mask_versions.add(result, result._version)
            elif function == Tensor.data.__get__:  # type: ignore[attr-defined]
                self._mask_versions.discard(
                    given_tensors[0]
                )  # what changes the data counts no version
        return result

    def _note_sizes(
        self, name: str, args: Sequence[Any], named: Mapping[str, Any], result: PyTree, inside: bool
    ) -> None:
        """Note that a function gives entries or a size; `inside` of a distribution it does not."""
        reads = _reads_a_size(name, result)
        self._has_shapes = self._has_shapes or (reads and inside)
        if _gives_entries(name, args, named) or (reads and not inside):
            self._knows_sizes = True

    def _is_by_samples(self, args: Sequence[Any]) -> bool:
        """Whether a number of a product or quotient is a multiple of the samples, or its inverse.

        A distribution's `batch_shape` has their number.
        """
        (number,) = (abs(one) for one in args if isinstance(one, int | float))
        times = max(number, 1 / number)
        return any(round(times) % size == 0 for size in self._sizes)

    def _note_entries(
        self, name: str, args: Sequence[Any], given_tensors: Sequence[Tensor], result: PyTree
    ) -> None:
        """Note of which sample a result is, where a loss takes samples [B, ...] one by one.

        Outputs of several heads [heads, B, ...] are no samples: each entry has a row for all.
        """
        source = given_tensors[0]
        index = args[1] if len(args) > 1 else 0
        rows = source.shape[0] if torch.Tensor.dim(source) else 0
        if source not in self._places and rows in self._rows:
            has_heads = torch.Tensor.dim(source) > 1 and source.shape[1] in self._rows
            if has_heads:
                return
            if name == "getitem" and type(index) is int:
                self._note_entry(result, index % rows, source in self._averaged)
            elif name == "unbind" and index == 0:
                for place, entry in enumerate(result):
                    self._note_entry(entry, place, source in self._averaged)
        elif all(leaf in self._places for leaf in given_tensors if leaf in self._outputs):
            self._follow_entries(name, given_tensors, result)

    def _follow_entries(self, name: str, given_tensors: Sequence[Tensor], result: PyTree) -> None:
        """Note what becomes of numbers of one sample each: another, several, or their sum."""
        entries = [leaf for leaf in given_tensors if leaf in self._places]
        is_averaged = any(leaf in self._averaged for leaf in entries)
        places = {self._places.get(leaf) for leaf in entries}
        if len(places) == 1 and isinstance(result, Tensor):
            divides = name in AVERAGES and not name.endswith("mean")
            weighs = name in PRODUCTS and len(entries) < 2
            self._note_entry(result, places.pop() or 0, is_averaged or divides or weighs)
        elif name in ("stack", "cat"):
            self._note(result, is_averaged=is_averaged, adds_up=False)
        elif name in KEEP_SUMS and not is_averaged:
            self._sums.add(result, True)

    def _note_entry(self, entry: Tensor, place: int, is_averaged: bool) -> None:
        self._places.add(entry, place)
        if is_averaged:
            self._averaged.add(entry, True)

    def _averages(
        self, name: str, args: Sequence[Any], named: Mapping[str, Any], result: PyTree
    ) -> bool:
        """Whether a mean or a quotient may be over samples; a mean of each sample is not.

        Neither is a quotient by a number for each sample, as a variance, unless these weigh as a
        mean does.
        """
        source: Any = args[0] if args else named.get("input")
        by: Any = args[1] if len(args) > 1 else named.get("dim", named.get("other"))
        if name in MEANS:
            has_rows = self._is_of_samples(source) and not self._is_turned
            return not has_rows or _has_first(by, source)
        if self._knows_sizes or name == "rtruediv" or not self._is_of_samples(by):
            return True
        return by not in self._outputs and self._weighs((source, by.reciprocal()), result)

    def _is_of_samples(self, numbers: Any) -> bool:
        """Whether numbers [B, ...] have a row for each of several samples."""
        if not isinstance(numbers, Tensor) or not numbers.dim():
            return False
        return numbers.size(0) in self._sizes and numbers.size(0) > 1

    def _weighs(self, given_tensors: Sequence[Tensor], result: PyTree) -> bool:
        """Whether a product of outputs may be by weights that add up to one; masks never do.

        It may where weights are outputs too, or may have been divided by the samples.
        """
        factors = [leaf for leaf in given_tensors if self._is_factor(leaf)]
        if not isinstance(result, Tensor):
            return True
        if not factors:
            is_by_a_number = len(given_tensors) < 2
            return is_by_a_number or self._knows_sizes or any(map(_adds_up_to_one, given_tensors))
        if self._knows_sizes and not all(leaf in self._undivided for leaf in factors):
            return True
        if all(map(self._is_mask, factors)):
            return False
        with torch._C.DisableTorchFunction(), torch.no_grad():
            weights = factors[0]
            for leaf in given_tensors:
                earlier = self._weights.get(leaf)
                weights = weights if earlier is None else weights * earlier
            like = result if result.dim() else weights
            total = float(weights.expand_as(like).sum(dtype=torch.float64))
        self._weights.add(result, weights)
        return abs(total - 1.0) < CLOSE

    def _is_factor(self, tensor: Tensor) -> bool:
        """Whether a tensor [...] has weights; of those that outputs made, the ones surely known."""
        is_constant = tensor in self._undivided and not tensor.requires_grad
        return is_constant or tensor not in self._outputs

    def _follow_undivided(self, name: str, given_tensors: Sequence[Tensor], result: PyTree) -> None:
        """Note numbers of outputs and targets which surely nothing divided by the samples."""
        if not isinstance(result, Tensor) or not (name in NO_DIVISIONS or name in CONVERSIONS):
            return
        if all(one in self._undivided for one in given_tensors):
            self._undivided.add(result, True)

    def _is_mask(self, tensor: Tensor) -> bool:
        """Whether a tensor [B, ...] has truths or whole numbers, or the same ones as floats."""
        if torch.Tensor.dim(tensor) == 0 or tensor.shape[0] not in self._sizes:
            return False
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return True
        return self._mask_versions.get(tensor) == tensor._version

    def _note(self, result: PyTree, *, is_averaged: bool, adds_up: bool) -> None:
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            if torch.Tensor.dim(leaf):
                self._outputs.add(leaf, True)
                if is_averaged:
                    self._averaged.add(leaf, True)
            elif adds_up:
                self._sums.add(leaf, True)


def _adds_up_to_one(numbers: Tensor) -> bool:
    """Whether numbers [B, ...] may weigh samples: in all or in a column they add up to one."""
    with torch.no_grad():
        of_columns = numbers.sum(0, dtype=torch.float64) if numbers.dim() else numbers
        are_one = (of_columns - 1).abs() < CLOSE
        return bool(are_one.any()) or abs(float(of_columns.sum()) - 1) < CLOSE


def _has_rows(output: Tensor, rows: Collection[int]) -> bool:
    """Whether an output [...] has a row for each sample, or several, as a codebook has not."""
    return any(number and output.size(0) % number == 0 for number in rows)


def _turns(source: Tensor, result: PyTree) -> bool:
    """Whether a function may have put another dim first, so that rows are no samples."""
    if not isinstance(result, Tensor) or not torch.Tensor.dim(result):
        return False
    with torch._C.DisableTorchFunction():
        are_alike = source.dim() == result.dim() and source.numel() == result.numel()
        are_strided = source.layout == result.layout == torch.strided
        return are_alike and are_strided and source.stride(0) != result.stride(0)


def _has_first(dims: Any, source: Tensor) -> bool:
    """Whether the dims of a mean, None for all, have the first of a tensor [B, ...]."""
    if dims is None:
        return True
    chosen = (dims,) if isinstance(dims, int) else tuple(dims)
    return any(one % source.dim() == 0 for one in chosen) or not chosen


def _is_one_number(result: PyTree, factors: Sequence[Tensor]) -> bool:
    """Whether a result of factors of one shape is one number."""
    if not isinstance(result, Tensor) or torch.Tensor.dim(result):
        return False
    return len({one.shape for one in factors}) == 1


def _has_one_tensor(args: Sequence[Any]) -> bool:
    """Whether a product or a quotient is of a tensor and a number other than zero."""
    numbers = [one for one in args if isinstance(one, int | float)]
    return len(args) == 2 and len(numbers) == 1 and numbers[0] != 0


def _gives_entries(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether a function gives samples one by one, which a list then counts."""
    if name == "getitem":
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        is_whole = isinstance(first, slice) and first == slice(None)
        return first is not Ellipsis and not is_whole
    place = PLACE_OF_DIM.get(name)
    if place is None:
        return False
    dim = args[place] if len(args) > place else named.get("dim", 0)
    return bool(dim == 0)


def _has_lists(given: PyTree) -> bool:
    """Whether a nesting has lists, or other values than tensors, which may count samples."""
    if isinstance(given, dict):
        return any(map(_has_lists, given.values()))
    if isinstance(given, tuple):
        return any(map(_has_lists, given))
    return given is not None and not isinstance(given, Tensor)


def _reads_a_size(name: str, result: PyTree) -> bool:
    """Whether a function gives a number of Python, which may be the number of samples."""
    leaves = tree_leaves(result)
    is_number = any(isinstance(one, int | float) and not isinstance(one, bool) for one in leaves)
    is_array = any(hasattr(one, "__array__") and not isinstance(one, Tensor) for one in leaves)
    return name not in DIMS and (is_number or is_array)
