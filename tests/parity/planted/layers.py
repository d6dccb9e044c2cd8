"""Faults of layers that are split, along tensor and context axes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from plait.models import gpt
from plait.parallel.context import group, ring, ulysses
from plait.parallel.tensor import column_row, layers, split
from plait.parallel.tensor.group import ForwardContext
from tests.parity import faults
from tests.parity.faults import wrap
from tests.parity.planted.entry import Entry

# -- tensor
# --------------------------------------------------------------------------------------------------


def no_sum_before_columns() -> list[Any]:
    """The inputs of column layers get the gradient of one rank's columns."""
    return [patch.object(ForwardContext, "enter", lambda self, x, axis, source, target: x)]


def no_sum_after_rows() -> list[Any]:
    def alone(axis: Any, target: Any, shape: Any, x: Any, compute: Any) -> Any:
        y = x.new_empty(shape)
        compute(y)
        return y

    return [patch.object(column_row, "compute_and_reduce", alone)]


def bias_on_each_rank() -> list[Any]:
    def make(original: Any) -> Any:
        def row(x: Any, weight: Any, bias: Any, context: Any, reduction: Any) -> Any:
            if bias is not None:
                bias = bias * reduction.axis.size
            return original(x, weight, bias, context, reduction)

        return row

    return [wrap(column_row, "row", make)]


def own_range_of_the_vocabulary() -> list[Any]:
    """The softmax is over this rank's range alone."""

    def cross_entropy(logits: Any, targets: Any, axis: Any, ignore_index: int) -> Any:
        size = logits.shape[-1]
        flat = targets.reshape(-1) % size
        total = F.cross_entropy(logits.reshape(-1, size), flat, reduction="sum")
        return total, (targets != ignore_index).sum()

    return [patch.object(split, "cross_entropy", cross_entropy)]


def absent_tokens_count() -> list[Any]:
    """A token of another rank's range gets the first row of this one's."""

    def make(original: Any) -> Any:
        def look_up(tokens: Any, table: Any, rule: Any, padding_index: Any = None) -> Any:
            found = original(tokens, table, rule, padding_index)
            return found + table[0]

        return look_up

    return [wrap(layers, "look_up", make)]


def no_partial_sums() -> list[Any]:
    return [patch.object(split.TensorSplit, "sum_partial", lambda self, gradients: None)]


def partial_sums_twice() -> list[Any]:
    def make(original: Any) -> Any:
        def twice(self: Any, gradients: Any) -> None:
            original(self, gradients)
            original(self, gradients)

        return twice

    return [wrap(split.TensorSplit, "sum_partial", make)]


def norm_counts_copies() -> list[Any]:
    return [patch.object(split.TensorSplit, "weight", lambda self, name: 1.0)]


def gradient_of_rows_halved() -> list[Any]:
    def make(original: Any) -> Any:
        def row(x: Any, *rest: Any) -> Any:
            return original(x * 0.5 + (x * 0.5).detach(), *rest)

        return row

    return [wrap(column_row, "row", make)]


# -- context
# --------------------------------------------------------------------------------------------------


def no_rescaling() -> list[Any]:
    def merge(out: Any, lse: Any, part: Any, part_lse: Any) -> None:
        out.add_(part)

    return [patch.object(ring, "merge", merge)]


def sees_the_future() -> list[Any]:
    def make(original: Any) -> Any:
        return lambda q, k, v, *, causal, mask=None: original(q, k, v, causal=False, mask=mask)

    return [wrap(ring, "attend", make)]


def gradients_stay() -> list[Any]:
    """Gradients of keys and values do not return to their owners."""
    return [patch.object(ring._GradientReturn, "send", lambda self, step, grads: None)]


def heads_change_places() -> list[Any]:
    def make(original: Any) -> Any:
        def forward(self: Any, q: Any, k: Any, v: Any, documents: Any = None) -> Any:
            return original(self, q, k, v, documents).roll(1, dims=1)

        return forward

    return [wrap(ulysses.UlyssesAttention, "forward", make)]


def targets_in_order() -> list[Any]:
    """Targets are cut in one piece, inputs in zig-zag order."""

    def make(original: Any) -> Any:
        def cut(self: Any, batch: Any) -> Any:
            (targets,) = batch[1]
            length = targets.shape[1] // self.axis.size
            own = targets[:, self.axis.rank * length : (self.axis.rank + 1) * length]
            return original(self, batch)[0], [own]

        return cut

    return [wrap(group.ContextGroup, "cut", make)]


def positions_from_zero() -> list[Any]:
    def make(original: Any) -> Any:
        def forward(self: Any, x: Any, positions: Any = None) -> Any:
            return original(self, x, torch.arange(x.shape[1]))

        return forward

    return [wrap(gpt.Positions, "forward", make)]


EVEN = {"model": "even"}
ENTRIES = [
    Entry("no sum before columns", "tp2", "missing-reduction", "tp", no_sum_before_columns, **EVEN),
    Entry(
        "no sum after rows", "tp2", "role", "tp", no_sum_after_rows, module="attention.o", **EVEN
    ),
    Entry(
        "bias on each rank", "tp2", "scale-some", "tp", bias_on_each_rank, module="mlp.down", **EVEN
    ),
    Entry("softmax of a range", "tp2", "loss", "tp", own_range_of_the_vocabulary, **EVEN),
    Entry("absent tokens count", "tp2", "role", "tp", absent_tokens_count, module="embed", **EVEN),
    Entry("norms are not summed", "tp2:1d,sp", "missing-reduction", "tp", no_partial_sums, **EVEN),
    Entry(
        "norms are summed twice",
        "tp2:1d,sp",
        "scale-some",
        "tp",
        partial_sums_twice,
        module="norm",
        **EVEN,
    ),
    Entry(
        "the norm counts copies", "tp2", "norm", "tp", norm_counts_copies, probe="clipping", **EVEN
    ),
    Entry(
        "half the gradient of rows",
        "tp2",
        "module",
        "tp",
        gradient_of_rows_halved,
        module="attention",
        **EVEN,
    ),
    Entry(
        "no rescaling in a ring", "cp2", "module", "cp", no_rescaling, module="attention", **EVEN
    ),
    Entry(
        "a ring sees the future", "cp2", "module", "cp", sees_the_future, module="attention", **EVEN
    ),
    Entry(
        "gradients of keys stay", "cp2", "module", "cp", gradients_stay, module="attention", **EVEN
    ),
    Entry(
        "heads change places",
        "cp2:ulysses",
        "module",
        "cp",
        heads_change_places,
        module="attention",
        **EVEN,
    ),
    Entry("targets are cut otherwise", "cp2", "loss", "cp", targets_in_order, **EVEN),
    Entry(
        "positions from zero", "cp2", "module", "cp", positions_from_zero, module="position", **EVEN
    ),
    Entry(
        "no sum over parts of sequences",
        "cp2",
        "missing-reduction",
        "cp",
        faults.no_all_reduce,
        **EVEN,
    ),
]
