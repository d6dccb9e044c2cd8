"""A synchronous parameter server: workers push gradients to server ranks, which update and send the
parameters back.

M. Li et al., Scaling Distributed Machine Learning with the Parameter Server (OSDI 2014). Keys
(whole parameters) are spread over the servers by bytes. Every rank is a worker; the first
`num_servers` of them (all, by default) also serve. A server sums the workers' pushes. With the mean
as aggregate, each worker weighs its own loss instead, so that here too nothing is divided.

A worker sends the keys of all servers but itself; a server sends its keys to all workers but
itself: B - B_own + (N-1) B_own bytes, which is 2(N-1)/N B where the keys divide evenly over all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from plait.comm import Axis, Work
from plait.parallel.data.bucket import Bucket
from plait.parallel.data.gradients import BucketState, PersistentGradients, Reducer
from plait.parallel.data.strategy import (
    DataGroup,
    DataStrategy,
    Replicas,
    bind,
    make_optimizer_shard,
)
from plait.parallel.data.units import Unit


def spread_keys(num_elements: Sequence[int], num_servers: int) -> list[int]:
    """The server of each key: the largest first, each to the server that has the fewest elements so
    far.

    `num_elements` has the size of each key.

    >>> spread_keys([4, 3, 3, 2], 2)
    [0, 1, 1, 0]
    """
    load = [0] * num_servers
    server_of_key = [0] * len(num_elements)
    for key in sorted(range(len(num_elements)), key=lambda key: -num_elements[key]):
        server = load.index(min(load))
        server_of_key[key] = server
        load[server] += num_elements[key]
    return server_of_key


class _Push:
    """Gradients of one server's bucket on their way: a worker sends them, the server receives and
    sums them.
    """

    def __init__(self, axis: Axis, server: int, grad: Tensor) -> None:
        self._grad = grad
        self._sends: list[Work] = []
        self._arriving: list[tuple[Tensor, Work]] = []
        if axis.rank != server:
            self._sends.append(axis.send(grad, server))
        else:
            for worker in range(axis.size):
                if worker != server:
                    pushed = torch.empty_like(grad)
                    self._arriving.append((pushed, axis.receive(pushed, worker)))

    def wait(self) -> None:
        for pushed, receive in self._arriving:
            receive.wait()
            self._grad.add_(pushed)
        for send in self._sends:
            send.wait()


class ParameterServer(DataStrategy):
    """`dpN:server`. One bucket a server; a server owns the whole of its keys, so any optimizer
    works.

    Shapes: the weights of each bucket are (numel,) on every rank, its masters on its server alone.

    Source: Li et al. 2014.
    """

    def __init__(self, units: Sequence[Unit], group: DataGroup) -> None:
        super().__init__(group)
        num_servers = min(group.num_servers or group.axis.size, group.axis.size)
        params = [named for unit in reversed(units) for named in unit.trainable]
        self._server: list[int] = []
        self._flats: list[Tensor] = []
        self._masters: list[Tensor] = []
        for server, keys in enumerate(keys_by_server(params, num_servers)):
            if keys:
                self.states.append(
                    BucketState(Bucket.of(f"server {server}", keys, 1), len(self.states))
                )
                self._allocate(self.states[-1], server)
        store = PersistentGradients(
            self.states, group.axis, group.master_dtype, group.device, keeps=True
        )
        self.reducer = Reducer(self.states, store, self._launch, eager=group.eager)
        self._pushes: list[_Push] = []

    def _allocate(self, state: BucketState, server: int) -> None:
        group = self.group
        bucket = state.bucket
        flat = torch.zeros(bucket.numel, dtype=group.param_dtype, device=group.device)
        for slot, view in zip(bucket.slots, bucket.views(flat), strict=True):
            bind(slot.param, view)
        self._server.append(server)
        self._flats.append(flat)
        master = flat
        if server == group.axis.rank:
            if group.param_dtype != group.master_dtype:
                master = torch.zeros_like(flat, dtype=group.master_dtype)
            self.pieces += [
                make_optimizer_shard(state, part, master, group, self.replicas)
                for part in bucket.parts(0, bucket.numel)
            ]
        self._masters.append(master)

    def load(self, state: BucketState, index: int, value: Tensor) -> None:
        slot = state.bucket.slots[index]
        for flat in (self._flats[state.index], self._masters[state.index]):
            flat[slot.offset : slot.stop].view(slot.shape).copy_(value)

    def _launch(self, state: BucketState) -> None:
        assert state.grad is not None
        self._pushes.append(_Push(self.group.axis, self._server[state.index], state.grad))

    def reduce(self) -> None:
        self.reducer.end_step()
        for push in self._pushes:
            push.wait()
        self._pushes.clear()
        for piece in self.pieces:
            assert piece.state.grad is not None
            piece.value.grad = piece.part.view(piece.state.grad)

    def publish(self) -> None:
        works = []
        for server, flat, master in zip(self._server, self._flats, self._masters, strict=True):
            if flat is not master:
                flat.copy_(master)
            works.append(self.group.axis.broadcast(flat, server))
        for work in works:
            work.wait()

    @property
    def replicas(self) -> Replicas:
        return Replicas(1, 0)

    def live_tensors(self) -> dict[str, list[Tensor]]:
        return {
            "parameters": list(self._flats),
            "gradients": [state.grad for state in self.states if state.grad is not None],
            "optimizer": [
                m for flat, m in zip(self._flats, self._masters, strict=True) if flat is not m
            ],
        }


def keys_by_server(
    params: Sequence[tuple[str, nn.Parameter]], num_servers: int
) -> list[list[tuple[str, nn.Parameter]]]:
    """The named parameters of each server, spread by `spread_keys`."""
    server_of_key = spread_keys([param.numel() for _, param in params], num_servers)
    by_server: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(num_servers)]
    for named, server in zip(params, server_of_key, strict=True):
        by_server[server].append(named)
    return by_server
