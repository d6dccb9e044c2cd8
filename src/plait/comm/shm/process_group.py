"""The shared-memory transport as a process group of torch: DDP, FSDP2 and DTensor of one host run
on it.

    plait.comm.shm.process_group.register()
    torch.distributed.init_process_group("plait")

Sums, means, gathers and broadcasts go through shared memory. All other operations go through Gloo,
and so does everything where the ranks are on several hosts. An operation that hands out a future is
complete when it does so. Ranks move their own bytes, and no thread moves them meanwhile.
"""

# torch writes each method down in several forms, and calls one of them
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.futures import Future

from plait.comm.backends.base import Handle
from plait.comm.shm.fabric import DTYPES
from plait.comm.shm.memory import MappedMemory
from plait.comm.shm.processes import connect
from plait.values import PyTree

NAME = "plait"
Reduction: TypeAlias = dist.ReduceOp | dist.ReduceOp.RedOpType
ScatterOptions: TypeAlias = dist.ReduceScatterOptions | None
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def register() -> None:
    """Make the backend `plait` known to torch; a second call changes nothing."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, SharedMemoryGroup, devices=["cpu"])


class _GroupWork(dist.Work):
    """One operation under way, with a last local step."""

    def __init__(self, handle: Handle, result: object, last: Callable[[], object] | None) -> None:
        super().__init__()
        self._handle: Handle | None = handle
        self._result = result
        self._last = last

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is there; the time limit is that of the group."""
        if self._handle is not None:
            handle = self._handle
            self._handle = None
            handle.wait()
            if self._last is not None:
                self._last()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has returned."""
        return self._handle is None

    def get_future(self) -> Future[object]:
        """A future that has its value."""
        self.wait()
        future: Future[object] = Future()
        future.set_result(self._result)
        return future

    def result(self) -> object:
        """The tensors of the result."""
        return self._result


class _GroupExchange:
    """Small picklable things between the ranks of a Gloo group: between the ranks of one run, never
    from outside.
    """

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self.rank = gloo.rank()
        self.size = gloo.size()

    def gather_objects(self, item: object) -> list[Any]:
        """The things of all ranks, in order."""
        packed = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        lengths = self._gather(torch.tensor([packed.numel()]))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: packed.numel()] = packed
        items = []
        for length, row in zip(lengths, self._gather(padded), strict=True):
            items.append(pickle.loads(row[: int(length)].numpy().tobytes()))
        return items

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        self._gloo.allgather([rows], [tensor]).wait()
        return rows


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group whose ranks read each other's memory where they can."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = ""
        self._description = ""
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._memory = MappedMemory()
        self._direct = None
        if size > 1:
            self._direct = connect(
                _GroupExchange(self._gloo), self._memory, timeout.total_seconds(), range(size)
            )

    @property
    def is_shared(self) -> bool:
        """Whether the ranks read each other's memory; else all operations are Gloo's."""
        return self._direct is not None

    def allreduce(
        self, tensors: list[Tensor], opts: dist.AllreduceOptions | None = None
    ) -> dist.Work:
        """Sum or mean of `tensors[0]` [...] in place; any other reduction by Gloo. Collective."""
        opts = dist.AllreduceOptions() if opts is None else opts
        if not self._serves(tensors, opts.reduceOp):
            return self._gloo.allreduce(tensors, opts)
        whole = tensors[0]
        flat = whole.detach().contiguous()

        def last() -> None:
            self._average(flat, opts.reduceOp)
            _copy_back(whole, flat)

        return self._work(lambda direct: direct.all_reduce(flat.view(-1)), tensors, last)

    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: dist.AllreduceOptions | None = None
    ) -> dist.Work:
        """`allreduce` of each tensor [...] in turn."""
        plain = dist.AllreduceOptions()
        if opts is not None:
            plain.reduceOp = opts.reduceOp
        works = [self.allreduce([tensor], plain) for tensor in tensors]
        return _all_of(works, tensors)

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> dist.Work:
        """The tensor [...] of the root, everywhere. Collective."""
        if not self._serves(tensors):
            return self._gloo.broadcast(tensors, opts)
        whole = tensors[0]
        flat = whole.detach().contiguous()
        root = opts.rootRank
        return self._work(
            lambda direct: direct.broadcast(flat, root), tensors, lambda: _copy_back(whole, flat)
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        """The tensors of all ranks, as a list: `inputs[0]` [...] into `outputs[0]`, one [...] a
        rank. Collective.
        """
        shard = inputs[0].detach().contiguous()
        full = shard.new_empty((self.size(), *shard.shape))

        def unpack() -> None:
            for tensor, part in zip(outputs[0], full, strict=True):
                tensor.copy_(part)

        return _then(self._gather_into(full, shard), outputs, unpack)

    def _allgather_base(self, full: Tensor, shard: Tensor, opts: object = None) -> dist.Work:
        return self._gather_into(full, shard)

    def allgather_into_tensor_coalesced(
        self, fulls: list[Tensor], shards: list[Tensor], opts: object = None
    ) -> dist.Work:
        """The shards (n, ...) of all ranks in each full tensor (size * n, ...), each pair in turn.
        Collective.
        """
        works = []
        for full, shard in zip(fulls, shards, strict=True):
            works.append(self._gather_into(full, shard))
        return _all_of(works, fulls)

    def _gather_into(self, full: Tensor, shard: Tensor) -> dist.Work:
        part = shard.detach().contiguous().view(-1)
        if not self._serves([shard]) or not full.is_contiguous():
            return self._gloo._allgather_base(full, part)
        flat = full.detach().view(-1)
        return self._work(lambda direct: direct.all_gather(flat, part), full)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: ScatterOptions = None
    ) -> dist.Work:
        """This rank's part of the sum or mean of a list of tensors: `inputs[0]`, one [...] a rank,
        into `outputs[0]` [...]. Collective.
        """
        return self._scatter_into(outputs[0], torch.stack(inputs[0]), _reduction(opts))

    def _reduce_scatter_base(
        self, out: Tensor, full: Tensor, opts: ScatterOptions = None
    ) -> dist.Work:
        return self._scatter_into(out, full, _reduction(opts))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], fulls: list[Tensor], opts: ScatterOptions = None
    ) -> dist.Work:
        """This rank's part (n, ...) of the sum or mean of each full tensor (size * n, ...), each
        pair in turn. Collective.
        """
        works = []
        for out, full in zip(outputs, fulls, strict=True):
            works.append(self._scatter_into(out, full, _reduction(opts)))
        return _all_of(works, outputs)

    def _scatter_into(self, out: Tensor, full: Tensor, reduction: Reduction) -> dist.Work:
        if not self._serves([out], reduction) or not out.is_contiguous():
            opts = dist.ReduceScatterOptions()
            opts.reduceOp = reduction
            return self._gloo._reduce_scatter_base(out, full.contiguous(), opts)
        flat = full.detach().contiguous().view(-1)
        part = out.detach().view(-1)
        return self._work(
            lambda direct: direct.reduce_scatter(part, flat),
            out,
            lambda: self._average(part, reduction),
        )

    def barrier(self, opts: dist.BarrierOptions | None = None) -> dist.Work:
        """Gloo's."""
        return self._gloo.barrier(dist.BarrierOptions() if opts is None else opts)

    def reduce(self, *arguments: object) -> dist.Work:
        """Gloo's."""
        return self._gloo.reduce(*arguments)

    def gather(self, *arguments: object) -> dist.Work:
        """Gloo's."""
        return self._gloo.gather(*arguments)

    def scatter(self, *arguments: object) -> dist.Work:
        """Gloo's."""
        return self._gloo.scatter(*arguments)

    def alltoall(self, *arguments: object) -> dist.Work:
        """Gloo's."""
        return self._gloo.alltoall(*arguments)

    def alltoall_base(self, *arguments: object) -> dist.Work:
        """Gloo's."""
        return self._gloo.alltoall_base(*arguments)

    def send(self, *arguments: object) -> dist.Work:
        """Gloo's."""
        return self._gloo.send(*arguments)

    def recv(self, *arguments: object) -> dist.Work:
        """Gloo's."""
        return self._gloo.recv(*arguments)

    def recv_anysource(self, *arguments: object) -> dist.Work:
        """Gloo's."""
        return self._gloo.recv_anysource(*arguments)

    # torch's newer names
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name under which it is registered."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """The name that torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Take the name that torch gives the group."""
        self._name = name

    @property
    def group_desc(self) -> str:
        """The description that torch gave the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def shutdown(self) -> None:
        """Give back the memory; peers that still wait for this rank fail at once."""
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        self._memory.close()

    def _serves(self, tensors: Sequence[Tensor], reduction: Reduction = dist.ReduceOp.SUM) -> bool:
        """Whether shared memory does the operation; all ranks answer alike."""
        sums = any(reduction == one for one in _SUMS)
        first = tensors[0]
        known = first.dtype in DTYPES and first.dtype != torch.bool
        return self._direct is not None and len(tensors) == 1 and sums and known

    def _average(self, tensor: Tensor, reduction: Reduction) -> None:
        if reduction == dist.ReduceOp.AVG:
            tensor.div_(self.size())

    def _work(
        self,
        start: Callable[[PyTree], Handle],
        result: object,
        last: Callable[[], object] | None = None,
    ) -> dist.Work:
        return _GroupWork(start(self._direct), result, last)


class _Waiting(Handle):
    """Works of torch as one handle."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _all_of(works: Sequence[dist.Work], result: object) -> dist.Work:
    return _GroupWork(_Waiting(works), result, None)


def _then(work: dist.Work, result: object, last: Callable[[], object]) -> dist.Work:
    return _GroupWork(_Waiting([work]), result, last)


def _reduction(opts: ScatterOptions) -> Reduction:
    """The reduction that options ask for; the sum where there are none."""
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _copy_back(whole: Tensor, flat: Tensor) -> None:
    """Bring a result to a tensor that was not contiguous."""
    if whole.data_ptr() != flat.data_ptr() or not whole.is_contiguous():
        whole.detach().copy_(flat)
