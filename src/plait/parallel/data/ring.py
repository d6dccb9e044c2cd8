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

from collections.abc import Iterator

import torch
from torch import Tensor

from plait.comm import Axis, Waitable

SEGMENT_BYTES = 8 << 20
"""The largest message. Each message costs a meeting of both ranks, so there should be few. Some are
needed, since one is added while the next is on its way.
"""


class RingAllReduce:
    """A ring all-reduce of `flat` (N * n,) under way on N ranks. Step 0 is on its way from the
    start, the others follow in `advance` and in `wait`.

    All ranks must wait for their rings in the order in which they began them.

    Source: Patarasuk and Yuan 2009.
    """

    def __init__(self, axis: Axis, flat: Tensor, padding: int) -> None:
        self._axis = axis
        self._chunks = list(flat.chunk(axis.size))
        self._padding = (
            padding  # at the end of the last chunk, which every rank but one sends on in each round
        )
        self._step = 0
        self._exchange = self._post() if axis.size > 1 else None

    def advance(self) -> bool:
        """Finish the step under way, and begin the next; whether another follows that one.

        So the steps of several rings take turns, and each travels while the others are added.
        """
        if self._exchange is None or self._step == self._last:
            return False
        self._exchange.finish()
        self._step += 1
        self._exchange = self._post()
        return self._step < self._last

    def wait(self) -> None:
        """Finish the ring."""
        while self.advance():
            pass
        if self._exchange is not None:
            self._exchange.finish()
            self._exchange = None

    @property
    def _last(self) -> int:
        return 2 * (self._axis.size - 1) - 1

    def _post(self) -> _RingExchange:
        """Send the chunk of this step to the next rank, and have the previous rank's on its way
        here.
        """
        size = self._axis.size
        adds = self._step < size - 1
        # The second time around, the first finished sum is that of chunk rank + 1.
        sent = self._axis.rank - self._step + (0 if adds else size)
        outgoing = self._chunks[sent % size]
        incoming = self._chunks[(sent - 1) % size]
        padding = self._padding if outgoing is self._chunks[-1] else 0
        return _RingExchange(self._axis, outgoing, incoming, padding, adds=adds)


class _RingExchange:
    """One step of the ring, segment by segment: one chunk goes to the next rank, another comes from
    the previous.

    A chunk that is added comes into memory of its own; a finished one comes into its place.
    """

    def __init__(
        self, axis: Axis, outgoing: Tensor, incoming: Tensor, padding: int, *, adds: bool
    ) -> None:
        segment_bytes = axis.paths.limit("ring_segment_bytes", SEGMENT_BYTES)
        segment = max(1, segment_bytes // outgoing.element_size())
        axis.paths.note("ring_segment_bytes", outgoing.numel() > segment)
        following = (axis.rank + 1) % axis.size
        previous = (axis.rank - 1) % axis.size
        self._adds = adds
        arriving = torch.empty_like(incoming) if adds else incoming
        self._pairs = list(zip(incoming.split(segment), arriving.split(segment), strict=True))
        self._receives = [axis.receive(part, previous) for _, part in self._pairs]
        parts = outgoing.split(segment)
        self._sends = [axis.send(part, following) for part in parts[:-1]]
        self._sends.append(axis.send(parts[-1], following, padding=min(padding, parts[-1].numel())))

    def finish(self) -> None:
        """Have every segment where it belongs, and what was sent free to be written."""
        for target, arrived in self.arrivals():
            if self._adds:
                target.add_(arrived)
        for send in self._sends:
            send.wait()

    def arrivals(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The place of each segment and what arrived for it, one after the other."""
        for pair, receive in zip(self._pairs, self._receives, strict=True):
            receive.wait()
            yield pair


def ring_all_reduce(axis: Axis, flat: Tensor, padding: int) -> Waitable:
    """Sum `flat` (numel,), its length a multiple of the axis, over the axis in place, around a
    ring. Collective; the sum is there after `wait`.

    `padding` of its last elements belong to no parameter, and are counted apart.
    """
    return RingAllReduce(axis, flat, padding)
