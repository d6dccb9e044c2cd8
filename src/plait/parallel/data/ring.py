"""Ring all-reduce written out: reduce-scatter, then all-gather, around a ring of point-to-point
messages.

P. Patarasuk and X. Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations (JPDC
2009). The buffer is cut into N chunks. With N = 4, the chunk that rank r sends and the one that it
receives and adds, step by step:

              reduce-scatter: adding               |  all-gather: copying
    step      0            1            2          |  3            4            5
    sends     r            r-1          r-2        |  r+1          r            r-1
    receives  r-1          r-2          r-3 = r+1  |  r            r-1          r-2

After N-1 steps rank r holds the full sum of chunk r+1. Every rank sends 2(N-1)/N of the buffer,
whatever N is. A chunk travels in segments, so that one is added while the next is on its way.
"""

from __future__ import annotations

from torch import Tensor

from plait.comm import Axis, Waitable

SEGMENT_BYTES = 1 << 20


class RingAllReduce:
    """A ring all-reduce of `flat` (N * n,) under way on N ranks. Step 0 is on its way from the
    start, the others follow in `wait`.

    All ranks must wait for their rings in the order in which they began them.

    Source: Patarasuk and Yuan 2009.
    """

    def __init__(self, axis: Axis, flat: Tensor, padding: int) -> None:
        self._axis = axis
        self._chunks = list(flat.chunk(axis.size))
        self._padding = (
            padding  # at the end of the last chunk, which every rank but one sends on in each round
        )
        self._done = axis.size == 1
        if not self._done:
            self._first = self._post(0)

    def advance(self) -> None:
        """Nothing to do ahead: each step needs the one before."""

    def wait(self) -> None:
        """Finish the ring."""
        if self._done:
            return
        self._done = True
        self._finish(self._first, add=True)
        for step in range(1, 2 * (self._axis.size - 1)):
            self._finish(self._post(step), add=step < self._axis.size - 1)

    def _post(self, step: int) -> _RingExchange:
        """Send the chunk of this step to the next rank, and have the previous rank's on its way
        here.
        """
        size = self._axis.size
        rank = self._axis.rank
        sent = rank - step
        if (
            step >= size - 1
        ):  # the second time around: the first finished sum is that of chunk rank + 1
            sent = rank + 1 - (step - (size - 1))
        outgoing = self._chunks[sent % size]
        incoming = self._chunks[(sent - 1) % size]
        return _RingExchange(
            self._axis, outgoing, incoming, self._padding if outgoing is self._chunks[-1] else 0
        )

    def _finish(self, exchange: _RingExchange, *, add: bool) -> None:
        for target, arrived in exchange.arrivals():
            if add:
                target.add_(arrived)
            else:
                target.copy_(arrived)


class _RingExchange:
    """One step of the ring, segment by segment: one chunk goes to the next rank, another comes from
    the previous.
    """

    def __init__(self, axis: Axis, outgoing: Tensor, incoming: Tensor, padding: int) -> None:
        segment_bytes = axis.paths.limit("ring_segment_bytes", SEGMENT_BYTES)
        segment = max(1, segment_bytes // outgoing.element_size())
        axis.paths.note("ring_segment_bytes", outgoing.numel() > segment)
        following = (axis.rank + 1) % axis.size
        previous = (axis.rank - 1) % axis.size
        self._targets = incoming.split(segment)
        self._arrived = [part.new_empty(part.shape) for part in self._targets]
        self._receives = [axis.receive(part, previous) for part in self._arrived]
        parts = outgoing.split(segment)
        self._sends = [axis.send(part, following) for part in parts[:-1]]
        self._sends.append(axis.send(parts[-1], following, padding=min(padding, parts[-1].numel())))

    def arrivals(self) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for target, arrived, receive in zip(
            self._targets, self._arrived, self._receives, strict=True
        ):
            receive.wait()
            pairs.append((target, arrived))
        for send in self._sends:
            send.wait()
        return pairs


def ring_all_reduce(axis: Axis, flat: Tensor, padding: int) -> Waitable:
    """Sum `flat` (numel,), its length a multiple of the axis, over the axis in place, around a
    ring. Collective; the sum is there after `wait`.

    `padding` of its last elements belong to no parameter, and are counted apart.
    """
    return RingAllReduce(axis, flat, padding)
