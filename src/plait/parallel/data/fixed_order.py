"""Sums of gradients in one fixed tree, whatever the number of ranks.

The leaves are the micro-batches of all ranks in the order of their samples. Sums are made in pairs,
pairs of pairs and so on, as a binary counter carries. With 8 micro-batches on two ranks:

    rank 0   ((g0 + g1) + (g2 + g3))  \\
                                        +  between ranks
    rank 1   ((g4 + g5) + (g6 + g7))  /

A rank's micro-batches are a whole subtree where their number is a power of two. So any number of
ranks adds the same numbers in the same order, and the bits are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm import Axis, Waitable, Work
from plait.parallel.data.gradients import BucketState, PersistentGradients


class TreeSum:
    """Adds tensors of one shape [...], one after the other, in the order of the tree; keeps one a
    level.
    """

    def __init__(self) -> None:
        self._subtrees: list[tuple[int, Tensor]] = []

    def clear(self) -> None:
        """Forget what was added."""
        self._subtrees.clear()

    def add(self, leaf: Tensor) -> None:
        """Take the next leaf [...], not the last; it is kept or overwritten."""
        level = 0
        total = leaf
        while self._subtrees and self._subtrees[-1][0] == level:
            _, earlier = self._subtrees.pop()
            total = earlier.add_(total)
            level += 1
        self._subtrees.append((level, total))

    def end(self, last: Tensor) -> None:
        """Leave the sum of all leaves in `last` [...], which is the last of them."""
        for _, earlier in reversed(self._subtrees):
            torch.add(earlier, last, out=last)
        self.clear()


class FixedOrderGradients(PersistentGradients):
    """Gradients of each micro-batch apart, added in the tree. Takes a buffer for each level."""

    def __init__(
        self,
        states: Sequence[BucketState],
        axis: Axis,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(states, axis, dtype, device)
        self._sums = {state.index: TreeSum() for state in states}

    def begin_step(self, states: Sequence[BucketState]) -> None:
        super().begin_step(states)
        for tree in self._sums.values():
            tree.clear()

    def end_micro_batch(self, states: Sequence[BucketState]) -> None:
        for state in states:
            state.zero_stale()
            assert state.grad is not None
            self._sums[state.index].add(state.grad.clone())
            state.stale = set(range(len(state.views)))

    def collect(self, state: BucketState) -> None:
        super().collect(state)
        assert state.grad is not None
        self._sums[state.index].end(state.grad)


class FixedOrderScatter:
    """A reduce-scatter in the tree: each rank gets all ranks' parts of its shard, and adds them.

    `full` is (N * n,) on each of N ranks, `out` (n,) is this rank's part. The call is collective,
    and may write into that part of `full`. It sends what any reduce-scatter sends. The buffer of
    the parts is one bucket more of memory.
    """

    def __init__(self, axis: Axis, out: Tensor, full: Tensor) -> None:
        self._out = out
        self._parts = torch.empty_like(full)
        self._work = axis.all_to_all(self._parts, full)
        self._size = axis.size

    def advance(self) -> bool:
        """Nothing to do ahead."""
        return False

    def wait(self) -> None:
        """Have the sum in `out`."""
        self._work.wait()
        parts = self._parts.view(self._size, -1)
        tree = TreeSum()
        for part in parts[:-1]:
            tree.add(part)
        last = parts[-1]
        tree.end(last)
        self._out.view(-1).copy_(last)


class FixedOrderReduce:
    """An all-reduce of `flat` (N * n,) over N ranks in the tree: the scatter, and a gather of the
    shards.

    All ranks must wait for their reductions in the order in which they began them.
    """

    def __init__(self, axis: Axis, flat: Tensor) -> None:
        self._axis = axis
        self._flat = flat
        self._own = flat.chunk(axis.size)[axis.rank]
        self._scatter = FixedOrderScatter(axis, self._own, flat)
        self._gather: Work | None = None

    def advance(self) -> bool:
        """Finish the scatter, and begin the gather; nothing follows it."""
        if self._gather is None:
            self._scatter.wait()
            self._gather = self._axis.all_gather(self._flat, self._own)
        return False

    def wait(self) -> None:
        """Finish both."""
        self.advance()
        assert self._gather is not None
        self._gather.wait()


def fixed_order_all_reduce(axis: Axis, flat: Tensor, padding: int) -> Waitable:
    """Sum `flat` (numel,), its length a multiple of the axis, over the axis in place, in the tree.
    Collective; the sum is there after `wait`.
    """
    return FixedOrderReduce(axis, flat)
