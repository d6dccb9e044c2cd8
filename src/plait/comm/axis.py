"""The axis: the only door to communication. One line of ranks along one mesh axis, or a product of
axes.

It checks what callers can get wrong, counts bytes by the formulae of `transitions`, times, and
names failures. A backend moves the bytes. On an axis of size one every operation is its local
meaning, and nothing is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.comm.backends.base import Backend, Exposed, Handle
from plait.comm.checks import check_peer, check_shapes, contiguous, flat, splits_of
from plait.comm.ledger import CONTROL, Ledger, MessageSize, num_bytes
from plait.comm.transitions import bytes_sent
from plait.comm.work import Label, Recorder, Work, naming_failure, recorded
from plait.errors import PlanError
from plait.paths import Paths
from plait.torch_internals import no_dispatch_modes


class Axis:
    """One line of ranks. N is its `size` in the shapes below, and `[...]` any shape.

    Operations of tensors are collective but for send and receive. Every rank calls them in one
    order, with one dtype and alike shapes. The result is there after `Work.wait`, which raises
    `RankFailed` for lost peers. `PlanError` comes first, for unknown coordinates and tensors that
    are not contiguous.

    Attributes:
        name: of the mesh axis; a product is `dp*cp`.
        ranks: the global ranks of the line, by coordinate.
        rank: this rank's coordinate: `ranks[rank]` is this process.
        size: the number of ranks.
        wire: the type in which transitions send wider numbers; None as they are.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        backend: Backend | None,
        recorder: Recorder,
        *,
        wire: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.wire = wire
        self._backend = backend
        self._recorder = recorder

    def rounding(self, wire: torch.dtype | None) -> Axis:
        """An axis of these ranks whose transitions send wider numbers in the type `wire`."""
        return Axis(self.name, self.ranks, self.rank, self._backend, self._recorder, wire=wire)

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, rank {self.rank} of {self.size}, ranks {list(self.ranks)})"

    @property
    def ledger(self) -> Ledger:
        """The ledger of this rank, shared by its axes."""
        return self._recorder.ledger

    @property
    def paths(self) -> Paths:
        """Which ways operations take by size, shared by the axes of this rank."""
        return self._recorder.paths

    @property
    def reads_peers(self) -> bool:
        """Whether its ranks read each other's memory."""
        return self._backend is not None and self._backend.can_expose

    def all_reduce(
        self, tensor: Tensor, *, out: Tensor | None = None, padding: int = 0, control: bool = False
    ) -> Work:
        """Sum `tensor` [...] over the axis: in place where it is contiguous, or into `out` [...].

        `out` is contiguous and of the shape of `tensor`, which then has any strides and is kept. It
        is there when the call returns. In place, `padding` elements only make the buffer divide,
        and are counted apart; so are scalars of `control`.
        """
        if out is not None:
            return self._all_reduce_into(out, tensor)
        tensor = contiguous(self, tensor)
        size = MessageSize.of(tensor, padding=padding, control=control)
        return self._issue("all_reduce", size, lambda b: b.all_reduce(tensor))

    def _all_reduce_into(self, out: Tensor, source: Tensor) -> Work:
        out = contiguous(self, out)
        source = source.detach()
        check_shapes(self, "all_reduce", out.shape, source.shape)
        work = self._issue(
            "all_reduce",
            MessageSize.of(out),
            lambda b: b.all_reduce_into(out, source),
            lambda: out.copy_(source),
        )
        work.wait()
        return work

    def reduce_scatter(self, out: Tensor, full: Tensor, *, padding: int = 0) -> Work:
        """Sum `full` over the axis and keep this rank's part of the sum, in `out`.

        `full` is (size * n,) and contiguous for n elements of `out`, or (size, *out.shape) of any
        strides. In the first form `out` may be this rank's part of `full`. Until the wait, `full`
        is in use; after it, the contents of `full` are undefined.
        """
        if self._is_strided(full, out):
            return self._reduce_scatter_strided(out, full, padding)
        out, full = flat(self, "reduce_scatter", out, full)
        size = MessageSize.of(full, padding=padding)
        return self._issue(
            "reduce_scatter", size, lambda b: b.reduce_scatter(out, full), lambda: _copy(out, full)
        )

    def _reduce_scatter_strided(self, out: Tensor, parts: Tensor, padding: int) -> Work:
        out = contiguous(self, out)
        parts = parts.detach()
        return self._issue(
            "reduce_scatter",
            MessageSize.of(parts, padding=padding),
            lambda b: b.reduce_scatter_strided(out, parts),
            lambda: out.copy_(parts[0]),
        )

    def all_gather(self, out: Tensor, shard: Tensor, *, padding: int = 0) -> Work:
        """Gather the shards of all ranks into `out`, by coordinate.

        `out` is (size * n,) and contiguous for a shard of n elements, or (size, *shard.shape) of
        any strides. In the first form `shard` may be this rank's part of `out`.
        """
        if self._is_strided(out, shard):
            return self._all_gather_strided(out, shard, padding)
        shard, full = flat(self, "all_gather", shard, out)
        size = MessageSize.of(full, padding=padding)
        return self._issue(
            "all_gather", size, lambda b: b.all_gather(full, shard), lambda: _copy(full, shard)
        )

    def _all_gather_strided(self, parts: Tensor, shard: Tensor, padding: int) -> Work:
        parts = parts.detach()
        shard = shard.detach()
        return self._issue(
            "all_gather",
            MessageSize.of(parts, padding=padding),
            lambda b: b.all_gather_strided(parts, shard),
            lambda: parts[0].copy_(shard),
        )

    def _is_strided(self, parts: Tensor, part: Tensor) -> bool:
        """Whether `parts` is (size, *part.shape), and not both are contiguous."""
        contiguous_both = parts.is_contiguous() and part.is_contiguous()
        return parts.shape == (self.size, *part.shape) and not contiguous_both

    def all_to_all(
        self,
        out: Tensor,
        source: Tensor,
        out_splits: list[int] | None = None,
        source_splits: list[int] | None = None,
    ) -> Work:
        """Send `source_splits[k]` rows (dimension 0) of `source` to rank k, receive `out_splits[k]`
        rows from it into `out`.

        `source` (sum of source_splits, ...) and `out` (sum of out_splits, ...) are contiguous.
        Without splits, equal parts. Empty splits are allowed.
        """
        out, source = contiguous(self, out), contiguous(self, source)
        sent_splits = splits_of(self, source, source_splits, "source")
        taken = splits_of(self, out, out_splits, "out")
        row_bytes = num_bytes(source) // source.shape[0] if source.shape[0] else 0
        return self._issue(
            "all_to_all",
            MessageSize(row_bytes * (sum(sent_splits) - sent_splits[self.rank])),
            lambda b: b.all_to_all(out, source, taken, sent_splits),
            lambda: _copy(out, source),
            exact=True,
        )

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Coordinate `root`'s `tensor` [...], contiguous, on every rank, in place."""
        tensor = contiguous(self, tensor)
        check_peer(self, root)
        return self._issue("broadcast", MessageSize.of(tensor), lambda b: b.broadcast(tensor, root))

    def reduce(self, tensor: Tensor, root: int) -> Work:
        """The sum of all `tensor` [...], contiguous, in place at `root`; undefined elsewhere."""
        tensor = contiguous(self, tensor)
        check_peer(self, root)
        return self._issue("reduce", MessageSize.of(tensor), lambda b: b.reduce(tensor, root))

    def send(self, tensor: Tensor, to: int, tag: int = 0, *, padding: int = 0) -> Work:
        """Send `tensor` [...], contiguous, to coordinate `to`. Sends and receives of a pair match
        in order of issue, for each tag (NCCL: for the pair).
        """
        tensor = contiguous(self, tensor)
        check_peer(self, to, other=True)
        size = MessageSize.of(tensor, padding=padding)
        return self._issue("send", size, lambda b: b.send(tensor, to, tag), peer=to)

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        """Fill `tensor` [...], contiguous, from coordinate `source`. The sender counts bytes."""
        tensor = contiguous(self, tensor)
        check_peer(self, source, other=True)
        start = lambda b: b.receive(tensor, source, tag)  # noqa: E731
        return self._issue("receive", MessageSize(0), start, exact=True, peer=source)

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1) -> Work:
        """Round the ring: send `tensor` to coordinate `rank + by`, receive `out` from `rank - by`
        (modulo size). Both are [...] of one shape, and contiguous.
        """
        out, tensor = contiguous(self, out), contiguous(self, tensor)
        if by % self.size == 0:
            return self._local("shift", lambda: _copy(out, tensor))
        to = (self.rank + by) % self.size
        source = (self.rank - by) % self.size
        return self._issue(
            "shift", MessageSize.of(tensor), lambda b: b.exchange(out, tensor, to, source)
        )

    def shift_and_add(self, out: Tensor, parts: Tensor, by: Sequence[int]) -> Work:
        """Several shifts at once: `parts[i]` goes to coordinate `rank + by[i]`, and what comes is
        added to `out` [...]. `parts` (len(by), *out.shape) and `by` are alike on all ranks.

        Counted as the shifts that it is. Raises `PlanError` for a distance that leads back to this
        rank.
        """
        out = contiguous(self, out)
        parts = contiguous(self, parts)
        check_shapes(self, "shift", parts.shape, (len(by), *out.shape))
        if any(distance % self.size == 0 for distance in by):
            raise PlanError(
                f"shift on axis {self.name} of size {self.size}: "
                f"by {list(by)} leads back to this rank"
            )
        peers = [((self.rank + far) % self.size, (self.rank - far) % self.size) for far in by]
        return self._issue(
            "shift",
            MessageSize.of(parts),
            lambda b: b.exchange_and_add(out, parts, peers),
            exact=True,
        )

    def rotate(self, *tensors: Tensor) -> Generator[Tensor]:
        """Yield the stacked tensors of every rank round the ring: this rank's, then those of
        coordinate `rank - 1`, `rank - 2` and so on.

        The tensors, k of them, have one shape [...], alike on all ranks; N tensors [k, ...] come.
        Every rank goes all the way. A yielded tensor is only read, and only until the next is asked
        for. The next is under way meanwhile, or is read in the memory of its rank. Counted as the
        shifts that it stands for. Closing the generator lets go of the last tensor.
        """
        parts = [each.detach() for each in tensors]
        if not self.reads_peers:
            # A shift gives borrowed memory back, so what is passed on has memory of its own.
            yield from self._pass_on(torch.stack(parts))
            return
        tensor = torch.stack(parts, out=self.borrow((len(parts), *parts[0].shape), parts[0]))
        work, exposed = self._expose(tensor)
        try:
            yield tensor
            work.wait()
            for step in range(1, self.size):
                with naming_failure(self._label("shift", 0), self._recorder.rank):
                    theirs = exposed.of((self.rank - step) % self.size)
                yield theirs
        finally:
            exposed.leave()

    def _expose(self, tensor: Tensor) -> tuple[Work, Exposed]:
        """The start of letting all ranks read `tensor`, where the backend can expose it."""
        exposed: list[Exposed] = []

        def start(backend: Backend) -> Handle:
            exposed.append(backend.expose(tensor))
            return exposed[0]

        size = MessageSize(num_bytes(tensor) * (self.size - 1))
        return self._issue("shift", size, start, exact=True), exposed[0]

    def _pass_on(self, tensor: Tensor) -> Generator[Tensor]:
        """The rotation by shifts: each is under way while the tensor before it is read. Two
        buffers are enough for any size.
        """
        current = tensor
        other = torch.empty_like(tensor)
        for _ in range(self.size - 1):
            work = self.shift(other, current)
            yield current
            work.wait()
            current, other = other, current
        yield current

    def barrier(self) -> None:
        """Return when every rank of the axis has called it."""
        if self._backend is not None:
            with recorded(self._label("barrier", 0), self._recorder):
                self._backend.barrier()

    def gather_objects(self, item: object) -> list[Any]:
        """Small picklable things of all ranks, by coordinate: for control, not for data; not
        counted.
        """
        if self._backend is None:
            return [item]
        with recorded(self._label("gather_objects", 0), self._recorder):
            return self._backend.gather_objects(item)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory (numel,) on which operations are fastest: shared memory where the
        backend has it.

        The call is local. The memory is freed with the last tensor on it. Peers that read it keep
        it mapped until they close.
        """
        if self._backend is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return self._backend.empty(numel, dtype, device)

    def borrow(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A staging buffer [*shape], uninitialised, for one operation, which gives it back.

        Peers read the operand there without a copy. A local call; type and device of `like` [...].
        """
        numel = math.prod(shape)
        if self._backend is None:
            return like.new_empty(tuple(shape))
        with no_dispatch_modes():  # how many are new depends on the peers: see `naming_failure`
            buffer = self._backend.borrow(numel, like.dtype, like.device)
            return buffer[:numel].view(tuple(shape))

    def regroup(self, ranks: tuple[int, ...], rank: int, backend: Backend | None) -> None:
        """Replace the ranks of the axis, where ranks come and go."""
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self._backend = backend
        self._recorder.flight.forget_axes()

    def close(self) -> None:
        """Give back what the backend owns; the axis is not used afterwards."""
        if self._backend is not None:
            self._backend.close()

    @property
    def says_waits(self) -> bool:
        """Whether its transport tells by itself that it waits for long."""
        return self._backend is not None and self._backend.says_waits

    def _label(self, op: str, sent_bytes: int) -> Label:
        return Label(self.name, op, sent_bytes, self.ranks)

    def _local(self, op: str, act: Callable[[], object] | None = None) -> Work:
        if act is not None:
            act()
        return Work(None, self._label(op, 0), self._recorder)

    def _issue(
        self,
        op: str,
        size: MessageSize,
        start: Callable[[Backend], Handle],
        alone: Callable[[], object] | None = None,
        *,
        exact: bool = False,
        peer: int = -1,
    ) -> Work:
        """Count, start and wrap one operation; `alone` is its meaning on one rank."""
        if self._backend is None:
            return self._local(op, alone)
        sent_bytes = size.bytes if exact else bytes_sent(op, size.bytes, self.size)
        padding_bytes = 0
        if size.padding_bytes:
            padding_bytes = bytes_sent(op, size.bytes + size.padding_bytes, self.size) - sent_bytes
        label = self._label(op, sent_bytes)
        if op != "receive":
            self.ledger.add(self.name, CONTROL if size.control else op, sent_bytes, padding_bytes)
        flight = self._recorder.flight
        entry = flight.issue(self.name, op, self.ranks, sent_bytes, peer)
        with naming_failure(label, self._recorder.rank):
            handle = start(self._backend)
        flight.started(entry)
        return Work(handle, label, self._recorder, entry)


def _copy(out: Tensor, source: Tensor) -> None:
    """The meaning of moving on one rank; nothing when both are the same memory."""
    if out.data_ptr() != source.data_ptr():
        out.view(-1).copy_(source.view(-1))
