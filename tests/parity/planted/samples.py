"""Faults of the samples that ranks read, and of what they gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait.datasets import Loader, loader
from plait.engine.batch import BatchSplitter
from plait.parallel.data import zero
from tests.parity.faults import wrap
from tests.parity.planted.entry import Entry

# -- samples
# --------------------------------------------------------------------------------------------------


def shares_overlap() -> list[Any]:
    def make(original: Any) -> Any:
        def bounds(count: int, shares: Any, rank: int) -> tuple[int, int]:
            first, last = original(count, shares, rank)
            return (first - 1 if first else first), last

        return bounds

    return [wrap(loader, "bounds", make)]


def batches(change: Callable[[Any, Any], Any]) -> Callable[[], list[Any]]:
    """`change(loader, batch)` where there are several ranks."""

    def make(original: Any) -> Any:
        def following(self: Any) -> Any:
            batch = original(self)
            return change(self, batch) if self.dp_size > 1 else batch

        return following

    return lambda: [wrap(Loader, "__next__", make)]


def _first_again(self: Any, batch: Any) -> Any:
    if not hasattr(self, "_first"):
        self._first = batch
    return self._first


def _filled_up(self: Any, batch: Any) -> Any:
    """A short part is filled up with copies of its first sample."""
    inputs, targets = batch
    missing = self.global_batch // self.dp_size - len(inputs)
    if missing <= 0 or not len(inputs):
        return batch
    return tuple(torch.cat([part, part[:1].expand(missing, -1)]) for part in (inputs, targets))


def seed_of_each_rank() -> list[Any]:
    def make(original: Any) -> Any:
        def start(self: Any, *args: Any, seed: int = 0, dp_rank: int = 0, **keys: Any) -> None:
            original(self, *args, seed=seed + dp_rank, dp_rank=dp_rank, **keys)

        return start

    return [wrap(Loader, "__init__", make)]


def skips_one() -> list[Any]:
    def make(original: Any) -> Any:
        def start(self: Any, *args: Any, **keys: Any) -> None:
            original(self, *args, **keys)
            if self.dp_size > 1:
                self._move(0, self.global_batch)

        return start

    return [wrap(Loader, "__init__", make)]


def micro_batches_overlap() -> list[Any]:
    def make(original: Any) -> Any:
        def split(self: Any, batch: Any) -> Any:
            found = original(self, batch)
            return [found[0], *found[:1], *found[2:]]

        return split

    return [wrap(BatchSplitter, "split", make)]


def publishes_late() -> list[Any]:
    """Every second update is not gathered."""

    def make(original: Any) -> Any:
        def publish(self: Any) -> None:
            self._turn = not getattr(self, "_turn", False)
            if self._turn:
                original(self)

        return publish

    return [wrap(zero.ShardedUpdate, "publish", make)]


ENTRIES = [
    Entry("gathered every other time", "dp2:zero1", "replicas", "dp", publishes_late),
    Entry("shares overlap", "dp2", "samples", "dp", shares_overlap),
    Entry(
        "targets of the next sample",
        "dp2",
        "targets",
        "dp",
        batches(lambda s, b: (b[0], b[1].roll(1, 0))),
    ),
    Entry("each rank's own order", "dp2", "samples", "dp", seed_of_each_rank),
    Entry("one batch for ever", "dp2", "data-order", "data", batches(_first_again)),
    Entry("the first batch is skipped", "dp2", "data-order", "data", skips_one),
    Entry(
        "short parts are filled up", "dp2", "samples", "dp", batches(_filled_up), probe="last-batch"
    ),
    Entry("micro-batches overlap", "mb2", "dropped", "mb", micro_batches_overlap),
]
