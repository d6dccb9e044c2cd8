"""torch's errors in the words of a user: which token, which target, how much memory.

Nothing is checked before a step, which would cost every step. When torch has refused, explainers
look at the error, the model and the batch. An error that none of them explains stays unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from plait.batch_trees import leaves_of
from plait.errors import DataError, ModelError, OutOfMemory, PlaitError

_CPU_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_OUTSIDE = re.compile(r"out of (range|bounds)|device-side assert|vocabulary")
_NO_INDEX = re.compile(r"\b(indices|index|Long|long)\b")
_CURE = (
    "try more micro-batches (mb), remat:full, precision:bf16 or dp:zero3, or a smaller batch; "
    "plait estimate says what a plan needs"
)


Explainer = Callable[[Exception], PlaitError | None]
"""Makes a better error of a torch error; None where it cannot."""


@contextmanager
def explained(*explainers: Explainer) -> Iterator[None]:
    """Raise the first error that an explainer makes of torch's; without one, torch's own."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        for explain in explainers:
            better = explain(error)
            if better is not None:
                raise better from error
        raise


def step_errors(
    model: nn.Module,
    batches: Sequence[tuple[object, object]] | None,
    rank: int,
    data_ranks: int,
    what: str,
) -> list[Explainer]:
    """Explainers of a work of that name on a rank.

    Each of the data ranks has as many samples.

    They look at memory, and at tokens and labels where the work has batches of (inputs, targets).
    """
    memory = memory_error(rank, what)
    if batches is None:
        return [memory]
    graph = graph_error(batches, data_ranks, what)
    tokens, labels = token_error(model, batches, what), label_error(model, what)
    return [memory, tokens, labels, graph, offsets_error(what)]


def memory_error(rank: int, what: str) -> Explainer:
    """Explains an allocation that failed on a rank, in a work of that name."""

    def explain(error: Exception) -> OutOfMemory | None:
        if isinstance(error, torch.OutOfMemoryError):
            first = str(error).split(". ")[0]
            return OutOfMemory(f"rank {rank} is out of memory in {what}: {first}; {_CURE}")
        if isinstance(error, MemoryError):
            return OutOfMemory(f"rank {rank} is out of memory in {what}; {_CURE}")
        match = _CPU_MEMORY.search(str(error))
        if match is None:
            return None
        size = f"{int(match[1]) / 1e9:,.1f} GB more than there is"
        return OutOfMemory(f"rank {rank} asked in {what} for {size}; {_CURE}")

    return explain


_INNER_GRADIENT = re.compile(
    r"element \d+ of tensors does not require grad|differentiated Tensors? .*not have been used"
)


def inner_gradient_error(model: nn.Module) -> Explainer:
    """Explains a gradient that a forward or a loss takes, of blocks that a pipeline divides."""

    def explain(error: Exception) -> ModelError | None:
        if _INNER_GRADIENT.search(str(error)) is None:
            return None
        return ModelError(
            f"the forward of {type(model).__name__} or the loss takes a gradient itself "
            "(torch.autograd.grad), and a pipeline has the graph of each stage on its own; take pp "
            "out of the plan: dp, zero3 and mb train such a model"
        )

    return explain


def whole_sequences_error(sequences: int) -> Explainer:
    """Explains an alignment of whole sequences in a loss that gets a part of each."""

    def explain(error: Exception) -> ModelError | None:
        if sequences == 1 or "ctc_loss" not in str(error):
            return None
        return ModelError(
            "the loss calls ctc_loss, which needs whole sequences, and under cp it gets one of "
            f"{sequences} parts of each, of outputs as of labels: {str(error)!r}; leave cp out"
        )

    return explain


def offsets_error(what: str) -> Explainer:
    """Explains offsets of an `EmbeddingBag`, of which each part of a batch has some alone."""

    def explain(error: Exception) -> DataError | None:
        if "offsets[0] has to be 0" not in str(error):
            return None
        return DataError(
            f"{what}: the offsets of an EmbeddingBag count tokens of a whole batch, and a batch is "
            f"divided by samples: {str(error)!r}; give each sample its tokens as one row of a "
            "padded tensor [samples, tokens] and no offsets, with padding_idx in the EmbeddingBag"
        )

    return explain


_UNEQUAL = re.compile(r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
_NO_BATCH = re.compile(r"batch2 tensor to be: \[\d+, (\d+)\] but got: \[\d+, (\d+)\]")
_NO_PRODUCT = re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")


def graph_error(batches: Sequence[tuple[object, object]], data_ranks: int, what: str) -> Explainer:
    """Explains an input [N, N, ...] of which each part of (inputs, targets) has some rows alone."""

    def explain(error: Exception) -> DataError | None:
        sizes = _sizes_that_differ(error)
        parts = data_ranks * len(batches)
        for leaf in leaves_of([inputs for inputs, _ in batches]):
            if not isinstance(leaf, Tensor) or leaf.dim() < 2:
                continue
            rows, columns = leaf.shape[:2]
            if parts > 1 and columns == rows * parts and sizes == {rows, columns}:
                return DataError(
                    f"{what}: each of the {parts} parts of a batch has {rows} rows of an input "
                    f"that is {[columns, *leaf.shape[1:]]}, and torch says {str(error)!r}; if it "
                    "is the adjacency of one graph, keep the graph whole (tpN:1d, remat, or dp1 "
                    "without mb), or make each graph of several one sample"
                )
        return None

    return explain


def graph_of_an_example_error(example: object) -> Explainer:
    """Explains an example of one sample whose input [1, N, ...] has all of a graph's columns."""

    def explain(error: Exception) -> ModelError | None:
        sizes = _sizes_that_differ(error)
        for leaf in leaves_of(example):
            if isinstance(leaf, Tensor) and leaf.dim() > 1 and set(leaf.shape[:2]) == sizes:
                return ModelError(
                    f"the forward refuses one sample, whose input is {list(leaf.shape)}: "
                    f"{str(error)!r}; if it is a row of the adjacency of one graph, cut the "
                    "pipeline by a whole graph, Options(cutting=Cutting(example=...)), and add mb1 "
                    "to the plan"
                )
        return None

    return explain


def example_error(model: nn.Module, example: object) -> Explainer:
    """Explains the refusal of an example of one sample, whose sizes may not fit the model."""

    def explain(error: Exception) -> ModelError | None:
        if not isinstance(error, RuntimeError | ValueError | IndexError):
            return None
        shapes = [list(leaf.shape) for leaf in leaves_of(example) if isinstance(leaf, Tensor)]
        return ModelError(
            f"to cut a {type(model).__name__} into stages its forward is run on one sample, whose "
            f"inputs are {', '.join(map(str, shapes))}, which ends in {str(error)!r}; let the "
            "first batch have what the forward takes, or give inputs of one sample by "
            "Options(cutting=Cutting(example=...))"
        )

    return explain


def _sizes_that_differ(error: Exception) -> set[int]:
    """The two sizes that torch says should be one; none where it says something else."""
    searched = (one.search(str(error)) for one in (_UNEQUAL, _NO_BATCH, _NO_PRODUCT))
    match = next((one for one in searched if one is not None), None)
    return set() if match is None else {int(match[1]), int(match[2])}


_CLASS = re.compile(r"Target (-?\d+) is out of bounds")


def label_error(model: nn.Module, what: str) -> Explainer:
    """Explains a label of a class that a cross entropy has no output for."""

    def explain(error: Exception) -> DataError | None:
        match = _CLASS.search(str(error))
        if match is None:
            return None
        config = getattr(getattr(model, "model", model), "config", None)
        count = getattr(config, "num_labels", None)
        known = f" 0 to {count - 1}" if isinstance(count, int) else ""
        return DataError(
            f"{what}: label {match[1]} is outside the classes{known}; give the model an output for "
            "each class (num_labels), count labels from 0, and mask with -100"
        )

    return explain


def token_error(model: nn.Module, batches: Iterable[tuple[object, object]], what: str) -> Explainer:
    """Explains tokens of (inputs, targets) that the model has no row of a table for."""

    def explain(error: Exception) -> DataError | None:
        text = str(error)
        looks_up = bool(_NO_INDEX.search(text))
        is_outside = bool(_OUTSIDE.search(text))
        if not looks_up and not is_outside:
            return None  # of shapes or dtypes, where a batch may have larger numbers, as times
        fault = _fault_of(model, batches, what, looks_up=looks_up, is_outside=is_outside)
        return None if fault is None else DataError(fault)

    return explain


def _fault_of(
    model: nn.Module,
    batches: Iterable[tuple[object, object]],
    what: str,
    *,
    looks_up: bool,
    is_outside: bool,
) -> str | None:
    """The fault in the tokens of (inputs, targets) for a model that looks tokens up. None where
    there is none.

    `looks_up`: whether torch's error may be about indices of another type than whole numbers.
    `is_outside`: whether it may be about an index that is too large.
    """
    tables = (one for one in model.modules() if isinstance(one, nn.Embedding))
    table = next(tables, None)  # tokens come before positions
    if table is None:
        return None
    vocab_size = table.num_embeddings
    for inputs, targets in batches:
        tokens = [leaf for leaf in leaves_of(inputs) if isinstance(leaf, Tensor)]
        if looks_up and tokens and all(leaf.is_floating_point() for leaf in tokens):
            return (
                f"{what}: the inputs are {tokens[0].dtype}, and the model looks tokens up; "
                "give token numbers as integers (torch.long)"
            )
        for name, leaves in (("token", tokens), ("target", leaves_of(targets))):
            wrong = _outside(leaves, vocab_size, name) if is_outside else None
            if wrong is not None:
                return (
                    f"{what}: {name} {wrong} is outside the vocabulary of {vocab_size} "
                    f"(0 to {vocab_size - 1}); fit the tokenizer or [model] vocab_size"
                )
    return None


def _outside(leaves: Iterable[object], vocab_size: int, name: str) -> int | None:
    """The first whole number outside a vocabulary; of targets, a negative one masks."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or not leaf.numel():
            continue
        high = int(leaf.max())
        low = int(leaf.min())
        if high >= vocab_size:
            return high
        if low < 0 and name == "token":
            return low
    return None
