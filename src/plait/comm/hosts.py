"""An axis with as many ranks on each of several hosts. The network carries a sum once a host, not
once a rank.

A large all-reduce begins with a reduce-scatter through the memory of each host. Then the ranks with
equal places on their hosts all-reduce their parts. A gathering through memory ends it.
Reduce-scatter and all-gather are the halves of that. They send other hosts as many times less as a
host has ranks. Small tensors go over Gloo, from each rank to each, and so do sums of halves.

The order of sums is fixed. First come the ranks of each host in the order of coordinates. Then come
the hosts, as Gloo's backend adds its ranks. One rank of a host adds up an element, and all hosts
get equal bits of it. So all ranks get equal bits.

A thread runs the operations of an axis one after another, so that they go on while the rank
computes. Their order is that of issue, which is alike on all ranks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from plait.comm.backends.base import Backend, Handle
from plait.comm.backends.gloo import Gloo
from plait.comm.severance import Severance
from plait.comm.shm.collectives import Direct
from plait.comm.shm.fabric import DTYPES
from plait.comm.shm.memory import LockedMemory
from plait.paths import Paths

HOSTS_BYTES = 256 << 10  # up to here a tensor waits for latency, not for bytes
CLOSE_SECONDS = 5.0
# halves would be rounded once by each host, and again between hosts
SUMMED = (torch.float32, torch.float64, torch.int64, torch.int32)


def ranks_a_node(hosts: Sequence[object]) -> int:
    """The length of the blocks of equal hosts, by rank; 0 for one host, or blocks of unequal
    length.

    >>> ranks_a_node("aabb"), ranks_a_node("aaaa"), ranks_a_node("abab"), ranks_a_node("abbb")
    (2, 0, 0, 0)
    """
    blocks = [len(list(block)) for _, block in itertools.groupby(hosts)]
    regular = len(blocks) == len(set(hosts)) > 1 and len(set(blocks)) == 1
    return blocks[0] if regular else 0


class HostBlock:
    """The ranks of this rank's host on a line of equal hosts, and small things between them.

    `size` of them are on each. All ranks of the line call together.
    """

    def __init__(self, line: Backend, size: int) -> None:
        self.rank = line.rank % size
        self.size = size
        self._line = line
        self.start = line.rank - self.rank

    def gather_objects(self, item: object) -> list[Any]:
        """The things of the ranks of this host, in order."""
        return self.of(self._line.gather_objects(item))

    def of(self, items: Sequence[Any]) -> list[Any]:
        """The part of this host in the things of all ranks of the line."""
        return list(items[self.start : self.start + self.size])


class Hosts(Gloo):
    """Gloo, but for large sums and gathers.

    `column` joins the ranks of equal places on their hosts, `inside` those of this host, both in
    the order of the line. `memory` is that of `inside` alone, and `severance` cuts `column`.
    """

    def __init__(
        self,
        line: Gloo,
        column: Gloo,
        inside: Direct,
        memory: LockedMemory,
        severance: Severance,
    ) -> None:
        super().__init__(line.group)
        self._column = column
        self._inside = inside
        self._memory = memory
        self._severance = severance
        self._runner = _Runner(self._fail)

    def _fail(self) -> None:
        """Have those that wait for this rank fail at once, as it did."""
        self._inside.close()
        self._severance.cut()

    def follow(self, paths: Paths) -> None:
        """Follow other paths, inside hosts and between them too."""
        super().follow(paths)
        self._column.follow(paths)
        self._inside.follow(paths)

    def _is_large(self, tensor: Tensor) -> bool:
        return self.paths.beyond("hosts_bytes", tensor.nbytes, HOSTS_BYTES)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Large: each rank of a host sums its part there, then with its like on other hosts."""
        divides = tensor.numel() % self._inside.size == 0
        if tensor.dtype not in SUMMED or not divides or not self._is_large(tensor):
            return super().all_reduce(tensor)
        flat = tensor.view(-1)
        own = flat.view(self._inside.size, -1)[self._inside.rank]

        def act() -> None:
            self._inside.reduce_scatter(own, flat).wait()
            self._column.all_reduce(own).wait()
            self._inside.all_gather(flat, own).wait()

        return self._runner.run(act)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Handle:
        """Large: the sums of this host for each other host, which then adds up what comes."""
        if full.dtype not in SUMMED or not self._is_large(full):
            return super().reduce_scatter(out, full)
        flat = out.view(-1)

        def act() -> None:
            rows = full.new_empty((self._column.size, flat.numel()))
            _wait(self._inside.reduce_scatter(*pair) for pair in self._by_host(rows, full))
            self._column.reduce_scatter(flat, rows.view(-1)).wait()

        return self._runner.run(act)

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """Large: each rank fetches the shards of its like on other hosts, and its neighbours copy
        them.
        """
        if full.dtype not in DTYPES or not self._is_large(full):
            return super().all_gather(full, shard)

        def act() -> None:
            rows = full.new_empty((self._column.size, shard.numel()))
            self._column.all_gather(rows.view(-1), shard.view(-1)).wait()
            _wait(self._inside.all_gather(block, row) for row, block in self._by_host(rows, full))

        return self._runner.run(act)

    def _by_host(self, rows: Tensor, full: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each host's row (n,) of `rows` (H, n), and its block (L * n,) of `full`."""
        return list(zip(rows.unbind(), full.view(len(rows), -1).unbind(), strict=True))

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that the ranks of this host read where it lies."""
        return self._inside.empty(numel, dtype, device)

    def close(self) -> None:
        """End the thread, and leave."""
        self._runner.close()
        self._severance.forget()
        self._inside.close()
        self._memory.close()


def _wait(handles: Iterable[Handle]) -> None:
    """Start all, then wait for each."""
    for handle in list(handles):
        handle.wait()


class _Operation(Handle):
    """One operation, run by the thread."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act
        self._ended = threading.Event()
        self._error: Exception | None = None

    def run(self, before: Exception | None) -> Exception | None:
        """Run it, or fail as the one `before` it; the error, if there is one."""
        act = self._act
        self._act = None
        self._error = before
        if before is None and act is not None:
            try:
                act()
            except Exception as error:  # raised where it is waited for
                self._error = error
        self._ended.set()
        return self._error

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error


class _Runner:
    """A thread that runs operations in order of issue, until one fails: then all fail alike."""

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._operations: SimpleQueue[_Operation | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, act: Callable[[], None]) -> Handle:
        """Have it run after all that came before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="plait-hosts", daemon=True)
            self._thread.start()
        operation = _Operation(act)
        self._operations.put(operation)
        return operation

    def close(self) -> None:
        """End the thread. One that waits for a lost rank is left to its time limit."""
        self._operations.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        error: Exception | None = None
        with torch.no_grad():
            while True:
                operation = self._operations.get()
                if operation is None:
                    return
                before = error
                error = operation.run(before)
                if error is not before:
                    self._failed()
