"""A batch and its micro-batches.

A batch is `(inputs, targets)`; either may be any nesting of tensors whose first dim counts samples,
also in mappings and dataclasses.
A mapping is taken too. The keys that the model's forward accepts are its inputs, and the loss sees
the whole mapping. A list of as many texts as samples is divided with them, as is a `SampleList`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from plait.batch_trees import (
    SampleList,
    agreed_size,
    entries_at,
    filled,
    held_leaves,
    is_per_sample,
    is_texts,
    is_whole,
    kept_whole,
    leaves_of,
    map_tensors,
    num_rows,
    once_each,
    refuse_undivided,
    sizes_of,
    tensors_of,
)
from plait.errors import DataError
from plait.torch_internals import on_device
from plait.values import JsonMapping, PyTree

COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@dataclass(frozen=True)
class MicroBatch:
    """The inputs, targets and sizes of one forward: tensors (samples, ...). `num_samples` is 0 for
    a placeholder that keeps this rank in step with the others.

    `num_rows`: of the inputs of all ranks of a tensor axis together; 0 without one.
    `ranks_a_sample`: ranks that have a part of each of its sequences. `parts`: into how many parts
    the inputs here were cut.
    """

    inputs: PyTree
    targets: PyTree
    num_samples: int
    num_rows: int = 0
    ranks_a_sample: int = 1
    parts: int = 1

    @property
    def own_samples(self) -> float:
        """This rank's share of the samples: their sum over all ranks is the number of samples."""
        return self.num_samples / self.ranks_a_sample

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors of its inputs, then how many texts and other entries they have."""
        lists = [leaf for leaf in leaves_of(self.inputs) if is_per_sample(leaf)]
        shapes = [tuple(tensor.shape) for tensor in tensors_of(self.inputs)]
        return (*shapes, *((len(entries),) for entries in lists))

    @property
    def tokens_per_sample(self) -> int:
        """The positions of a sequence of integers; 1 where the inputs are no such sequences."""
        for leaf in leaves_of(self.inputs):
            if not isinstance(leaf, Tensor) or is_whole(leaf):
                continue
            if leaf.dim() > 1 and not leaf.is_floating_point():
                return int(leaf.shape[1]) * self.parts
        return 1


class BatchSplitter:
    """Cuts the batches of one model into micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        num_micro_batches: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        cut: Callable[[PyTree], PyTree] = lambda batch: batch,
        share: Callable[[MicroBatch], MicroBatch] = lambda micro_batch: micro_batch,
        divides: bool = True,
        ranks_a_sample: int = 1,
        parts: int = 1,
    ) -> None:
        """Split the batches of `model`.

        `cut` takes this rank's part of the sequences of a batch. `share` takes this rank's part of
        a micro-batch on the tensor axis. `divides`: whether anything divides the samples of a
        batch here. `ranks_a_sample` and `parts`: see `MicroBatch`.
        """
        self._divides = divides
        self._ranks_a_sample = ranks_a_sample
        self._parts = parts
        self.num_micro_batches = num_micro_batches
        self._dtype = dtype
        self._device = device
        self._cut = cut
        self._share = share
        self._forward = _Forward.of(model)
        self._model = model

    def split(self, batch: PyTree) -> list[MicroBatch]:
        """Cut a batch into `num_micro_batches` parts whose sizes differ by one sample at most.

        Tensors (samples, ...) are cut along their first dim, and moved to the device. Without a
        sample a part has one of zeros, a placeholder.

        Raises:
            DataError: no such batch, a NumPy array in it, or first dims that differ.
        """
        inputs, targets = inputs_and_targets(batch)
        if isinstance(batch, Mapping):
            inputs = self._forward.taken(inputs)
        else:
            self._forward.check(inputs)
            inputs = _named_texts(self._model, inputs)
        whole = (inputs, targets)
        input_leaves, target_leaves = self._cut((leaves_of(inputs), leaves_of(targets)))
        is_held = [held for _, held in held_leaves(whole)]
        pairs = list(zip((*input_leaves, *target_leaves), is_held, strict=True))
        place = once_each(self._place)
        tensors = [place(leaf, held) for leaf, held in pairs]
        num_samples = self._num_samples(inputs, targets, [*zip(tensors, is_held, strict=True)])
        parts_of = once_each(lambda leaf, _: self._parts_of(leaf, num_samples))
        parts = [parts_of(leaf, held) for leaf, held in zip(tensors, is_held, strict=True)]
        if num_samples < self.num_micro_batches:
            parts = [[_never_empty(part) for part in column] for column in parts]
        result = []
        for index in range(self.num_micro_batches):
            size = num_samples // self.num_micro_batches + (
                index < num_samples % self.num_micro_batches
            )
            part_inputs, part_targets = filled(whole, (column[index] for column in parts))
            micro = MicroBatch(
                part_inputs,
                part_targets,
                size,
                ranks_a_sample=self._ranks_a_sample,
                parts=self._parts,
            )
            result.append(self._share(micro))
        return result

    def _num_samples(
        self, inputs: PyTree, targets: PyTree, leaves: Sequence[tuple[PyTree, bool]]
    ) -> int:
        """The first dim on which tensors agree; that of the targets where nothing is divided."""
        if self._divides or len(set(sizes_of(leaves))) < 2:
            return agreed_size(leaves)
        if isinstance(inputs, Mapping) and isinstance(targets, Mapping):
            labels = {key: value for key, value in targets.items() if key not in inputs}
            return num_rows(labels, inputs) or 0
        return num_rows(targets, inputs) or 0

    def _parts_of(self, leaf: PyTree, num_samples: int) -> Sequence[PyTree]:
        """The micro-batches' parts of a leaf; one that has no samples is whole in each."""
        if self.num_micro_batches > 1:
            refuse_undivided(leaf, num_samples)
            if isinstance(leaf, Tensor) and leaf.dim() and not is_whole(leaf):
                if leaf.size(0) == num_samples:
                    return leaf.tensor_split(self.num_micro_batches)
                return [kept_whole(leaf)] * self.num_micro_batches
        elif isinstance(leaf, Tensor) and leaf.dim() and leaf.size(0) != num_samples:
            return [kept_whole(leaf)]
        if is_per_sample(leaf) and len(leaf) == num_samples:
            places = torch.arange(num_samples).tensor_split(self.num_micro_batches)
            return [entries_at(leaf, part.tolist()) for part in places]
        return [leaf] * self.num_micro_batches

    def _place(self, leaf: PyTree, held: bool) -> PyTree:
        if isinstance(leaf, SampleList):
            return map_tensors(self._placed, leaf)
        if isinstance(leaf, Tensor):
            placed = self._placed(leaf)
            return kept_whole(placed) if is_whole(leaf) else placed
        if not held:
            _refuse_array(leaf)
        return leaf

    def _placed(self, leaf: Tensor) -> Tensor:
        dtype = leaf.dtype
        if leaf.is_floating_point():
            dtype = self._dtype
        elif leaf.is_complex():
            dtype = COMPLEX.get(self._dtype, dtype)
        return on_device(leaf, self._device).to(dtype)


def inputs_and_targets(batch: PyTree) -> tuple[PyTree, PyTree]:
    """The two parts of a batch; a mapping is both. Raises `DataError` for anything else."""
    if isinstance(batch, Mapping):
        return dict(batch), dict(batch)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(f"a batch is (inputs, targets) or a mapping; this one is {_describe(batch)}")


def accepted(model: nn.Module, inputs: PyTree) -> PyTree:
    """The entries of a mapping that the model's forward takes; anything else as it is.

    Texts of a tuple have names where the forward takes more than one. Errors: `DataError` for a
    mapping without an argument that the forward needs.
    """
    if isinstance(inputs, Mapping):
        return _Forward.of(model).taken(inputs)
    return _named_texts(model, inputs)


def call(model: nn.Module, inputs: PyTree) -> PyTree:
    """Run the model on the inputs of a micro-batch."""
    positional, named = arguments(inputs)
    return model(*positional, **named)


def arguments(inputs: PyTree) -> tuple[Sequence[PyTree], JsonMapping]:
    """Positional and named arguments of a model's forward, from the inputs of a micro-batch."""
    if isinstance(inputs, Mapping):
        return (), inputs
    if isinstance(inputs, tuple | list) and not is_per_sample(inputs):
        return inputs, {}
    return (inputs,), {}


@dataclass(frozen=True)
class _Forward:
    """A model's forward, by its arguments.

    Attributes:
        name: of its class and itself.
        accepted: the names that it takes; None when it takes any.
        required: the names of those that have no default.
        is_direct: whether it gets what the model is called with; a hook may change the names.
    """

    name: str
    accepted: frozenset[str] | None
    required: tuple[str, ...]
    is_direct: bool

    @classmethod
    def of(cls, model: nn.Module) -> _Forward:
        """The forward that a model has now."""
        parameters = inspect.signature(model.forward).parameters.values()
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return cls(
            f"{type(model).__name__}.forward",
            None if takes_any else frozenset(one.name for one in parameters),
            tuple(
                one.name
                for one in parameters
                if one.default is one.empty and one.kind not in several
            ),
            not model._forward_pre_hooks_with_kwargs,
        )

    def taken(self, inputs: JsonMapping) -> JsonMapping:
        """The entries of a batch that is a mapping which the forward takes."""
        names = inputs.keys() if self.accepted is None else inputs.keys() & self.accepted
        missing = [name for name in self.required if name not in names]
        if missing and self.is_direct:
            self._refuse(inputs, f"needs {', '.join(missing)} too")
        return {name: inputs[name] for name in sorted(names)}

    def check(self, inputs: PyTree) -> None:
        """Raise `DataError` for inputs that are a mapping with other names than the arguments."""
        if not self.is_direct or not isinstance(inputs, Mapping):
            return
        self.taken(inputs)
        unknown = [str(name) for name in inputs if name not in (self.accepted or inputs)]
        if unknown:
            self._refuse(inputs, f"takes no {', '.join(unknown)}")

    def _refuse(self, inputs: JsonMapping, reason: str) -> NoReturn:
        names = ", ".join(map(str, inputs)) or "no entry"
        raise DataError(
            f"a batch has a mapping of {names}, which are arguments by name, and {self.name} "
            f"{reason}; a mapping that is one argument itself stands in a tuple, as "
            "((mapping,), targets)"
        )


def _named_texts(model: nn.Module, texts: PyTree) -> PyTree:
    """A tuple of texts, by the names of a forward that takes more than one; else as it is."""
    if not isinstance(texts, tuple) or not is_texts(texts):
        return texts
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    required = [one for one in positional if one.default is one.empty]
    if not 1 < len(required) <= len(texts) <= len(positional):
        return texts
    return {one.name: text for one, text in zip(positional, texts, strict=False)}


def _refuse_array(leaf: PyTree) -> None:
    """Raise `DataError` for a NumPy array, of which each rank would keep all samples."""
    if isinstance(leaf, np.ndarray) and leaf.ndim > 0:
        raise DataError(
            f"a batch has a NumPy array of shape {leaf.shape}, which is not divided over ranks and "
            "micro-batches; give a tensor, as torch.as_tensor(array), or let a DataLoader collate "
            "the samples"
        )


def _never_empty(part: PyTree) -> PyTree:
    """A placeholder sample of zeros instead of no sample: every rank must take part in every
    collective.
    """
    if isinstance(part, SampleList):
        return SampleList(part)
    if isinstance(part, Tensor) and part.dim() > 0 and part.size(0) == 0:
        return part.new_zeros((1, *part.shape[1:]))
    return part


def _describe(batch: PyTree) -> str:
    return f"a {type(batch).__name__}" + (
        f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    )
