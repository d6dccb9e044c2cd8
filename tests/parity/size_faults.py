"""Faults behind a size: each shows only where a tensor is large, a sequence long, or a few steps
have gone by.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from plait.comm.shm import collectives
from plait.models import gated
from plait.parallel.context import ring_schedule
from plait.parallel.data import ring
from plait.parallel.expert import replace as placing
from plait.parallel.tensor import split, summa
from tests.parity.faults import wrap


def streamed_panels() -> list[Any]:
    """The last panel of a product that streams is used at half its value."""

    def make(original: Any) -> Any:
        def panels(travelling: Any) -> Any:
            size = travelling[0][0].size
            for t, found in original(travelling):
                yield t, [panel * 0.5 for panel in found] if t == size - 1 else found

        return panels

    return [wrap(summa, "panels", make)]


def met_one_by_one() -> list[Any]:
    """A ring that meets one part at a time loses the gradients of the last."""

    def make(original: Any) -> Any:
        def gather(self: Any, parts: Tensor, grads: Any) -> None:
            original(self, parts, grads)
            if len(parts) == 1 and 1 in self.shifts:
                parts.zero_()

        return gather

    return [wrap(ring_schedule.RingStep, "gather", make)]


def large_all_reduce() -> list[Any]:
    """Where each rank sums its range, the last element of every range is left out."""

    def make(original: Any) -> Any:
        def shard(numel: int, size: int, rank: int) -> tuple[int, int]:
            start, stop = original(numel, size, rank)
            return start, max(start, stop - 1)

        return shard

    return [wrap(collectives, "shard_range", make)]


def last_segment_lost() -> list[Any]:
    def make(original: Any) -> Any:
        def arrivals(self: Any) -> Any:
            found = list(original(self))
            if len(found) > 1:
                target, _ = found.pop()
                if not self._adds:
                    target.zero_()  # it came into its place
            return found

        return arrivals

    return [wrap(ring._RingExchange, "arrivals", make)]


def large_shared_gradients() -> list[Any]:
    """Gradients that are summed where they lie are not."""

    def make(original: Any) -> Any:
        def together(tensors: Any, axis: Any) -> None:
            paths = axis.paths
            limit = paths.limit("shared_gradient_numel", split.ALONE_NUMEL - 1)
            original([tensor for tensor in tensors if tensor.numel() <= limit], axis)

        return together

    return [wrap(split, "_sum_together", make)]


def second_chunk_of_an_expert() -> list[Any]:
    """Rows behind an expert's first chunk get the first expert's weights."""

    def make(original: Any) -> Any:
        def chunks(counts: Any, products: Any) -> Any:
            seen: set[int] = set()
            for expert, part, by in original(counts, products):
                yield (0 if expert in seen else expert), part, by
                seen.add(expert)

        return chunks

    return [wrap(gated, "_chunks", make)]


def placed_anew() -> list[Any]:
    """A layer whose experts have been placed anew weighs them otherwise."""

    def make(original: Any) -> Any:
        def put(layer: Any, layout: Any) -> None:
            original(layer, layout)
            layer.router.settings = replace(layer.router.settings, scale=1.01)

        return put

    return [wrap(placing, "put", make)]
