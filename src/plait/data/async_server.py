"""An asynchronous parameter server with bounded staleness: workers push gradients and fetch weights
at their own pace.

Every rank is a worker; the first `num_servers` of them (all, by default) also serve, each from
threads of its own, so that a server answers while its own worker computes. Keys are spread over the
servers by bytes, as under `server`. A step of a worker sends its gradients to every server and gets
the weights back; each server decides by itself when (`staleness`, `key_server`), so the weights of
a step may be of different versions on different servers, none of them too old.

A worker sends the keys of all servers but itself, a server its keys to each other worker that
pushes: the bytes of the synchronous server, without its waiting. With K = 0 it *is* the synchronous
server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from plait.comm import Axis
from plait.comm.calls import Address, Line, Message, Service, own_host
from plait.comm.crew import Crew
from plait.data.asynchrony import Change
from plait.data.bucket import Bucket
from plait.data.gradients import BucketState, Collector, PersistentGradients
from plait.data.key_server import REFUSED, KeyServer, Push, Receipt
from plait.data.server import ParameterServer, keys_by_server
from plait.data.strategy import (
    DataGroup,
    DataStrategy,
    Replicas,
    Told,
    Weight,
    bind,
    make_piece,
    squared_norm,
)
from plait.data.units import Unit
from plait.errors import RankFailed, RunError

PUSH, JOIN, REST, WEIGHTS = range(4)


class AsyncServer(DataStrategy):
    """`dpN:async-server,staleK` with K above 0."""

    lockstep: ClassVar[bool] = False

    def __init__(self, units: Sequence[Unit], group: DataGroup) -> None:
        super().__init__(group)
        self._own = group.axis.rank
        self._num_workers = group.axis.size
        if group.crew is not None:
            self._own = group.crew.seat
            self._num_workers = group.crew.num_seats
        self._num_servers = min(group.num_servers or self._num_workers, self._num_workers)
        params = [named for unit in reversed(units) for named in unit.trainable]
        self._rank_of_server: list[int] = []
        self._flats: list[Tensor] = []
        for server, keys in enumerate(keys_by_server(params, self._num_servers)):
            if keys:
                state = BucketState(Bucket.of(f"server {server}", keys, 1), len(self.states))
                self.states.append(state)
                self._allocate(state, server)
        self.collector = Collector(
            self.states, PersistentGradients(self.states, group.axis, group.master_dtype), _stays
        )
        self._master: Tensor | None = None
        self.server: KeyServer | None = None
        self._service: Service | None = None
        self._lines: list[Line | None] = []
        self._addresses: list[Address] = []
        self._begin_serving_keys()
        self._resting = False
        self._scalars = (0.0, 0.0)
        self._receipts: list[Receipt] = []
        self._heard = (0.0, 0.0)

    # -- memory
    # -------------------------------------------------------------------------------------------------------

    def _allocate(self, state: BucketState, server: int) -> None:
        flat = torch.zeros(
            state.bucket.numel, dtype=self.group.param_dtype, device=self.group.device
        )
        for slot, view in zip(state.bucket.slots, state.bucket.views(flat), strict=True):
            bind(slot.param, view)
        self._rank_of_server.append(server)
        self._flats.append(flat)

    def _begin_serving_keys(self) -> None:
        """The pieces of the keys that this rank serves. Their memory is the server's own: its
        threads write there.
        """
        group = self.group
        for state, rank in zip(self.states, self._rank_of_server, strict=True):
            if rank == self._own:
                bucket = state.bucket
                self._master = torch.zeros(
                    bucket.numel, dtype=group.master_dtype, device=group.device
                )
                grad = torch.zeros_like(self._master)
                self.pieces = [
                    make_piece(state, part, self._master) for part in bucket.parts(0, bucket.numel)
                ]
                self._grads = [piece.part.view(grad) for piece in self.pieces]
                self.server = KeyServer(self._num_workers, self._own, group.asynchrony, grad)

    def write(self, state: BucketState, index: int, value: Tensor) -> None:
        slot = state.bucket.slots[index]
        mine = (
            []
            if self._master is None or self._rank_of_server[state.index] != self._own
            else [self._master]
        )
        for flat in (self._flats[state.index], *mine):
            flat[slot.offset : slot.stop].view(slot.shape).copy_(value)

    def publish(self) -> None:
        """All workers get the servers' weights at once. Collective; nobody is in a step.

        Where ranks come and go a worker fetches them when its next step begins: they may not be all
        there.
        """
        works = []
        for rank, flat in zip(self._rank_of_server, self._flats, strict=True):
            if rank == self._own and self._master is not None:
                flat.copy_(self._master)
            if self.group.crew is None:
                works.append(self.group.axis.broadcast(flat, rank))
        self._resting = self._resting or (self.group.crew is not None and bool(self._addresses))
        for work in works:
            work.wait()

    # -- serving
    # ------------------------------------------------------------------------------------------------------

    def start(self, apply: Callable[[Change], None]) -> None:
        """Serve, with `apply` as the optimizer of the pieces, and call the other servers.
        Collective.
        """
        if self.server is not None:

            def update(change: Change) -> None:
                for piece, grad in zip(self.pieces, self._grads, strict=True):
                    piece.value.grad = grad
                apply(change)

            self.server.apply = update
        if self.group.crew is not None:
            self._come_in(self.group.crew)
            return
        axis = self.group.axis
        hosts = axis.gather_objects(own_host(same_host=False))
        self._serve(own_host(same_host=len(set(hosts)) == 1))
        addresses = axis.gather_objects(None if self._service is None else self._service.address)
        self._addresses = [addresses[rank] for rank in self._rank_of_server]
        self._call()

    def _serve(self, host: str) -> None:
        if self.server is not None:
            self._service = Service(self._answer, self.server.leave, host)

    def _come_in(self, crew: Crew) -> None:
        """Servers leave word where they are; a worker that was there before begins where the others
        are now.
        """
        came = f"rank {self._own} came"
        told = "server {}"
        if crew.knows(came) and self.server is not None:
            raise RunError(
                f"rank {self._own} served keys, which were lost with it; go on from a checkpoint"
            )
        self._serve(own_host(same_host=True))
        if self._service is not None:
            crew.tell(told.format(self._own), self._service.address.as_text())
        self._addresses = [
            Address.of_text(crew.learn(told.format(rank))) for rank in self._rank_of_server
        ]
        crew.here()
        self._call()
        if crew.knows(came):
            self._ask_all(Message(JOIN))
            self.steps_before = max(receipt.steps for receipt in self._receipts)
        crew.tell(came, "")

    def _answer(self, worker: int, question: Message) -> Message:
        """What a worker's thread is told. Called in threads of the service."""
        assert self.server is not None
        if question.kind == REST:
            self.server.leave(worker)
            return Message(REST)
        if question.kind == JOIN:
            return _weights(*self.server.join(worker, self._snapshot))
        assert question.data is not None
        step, count, loss_sum = question.numbers[:3]
        grad = question.data.view(self.group.master_dtype).to(self.group.device)
        self.server.push(worker, Push(int(step), count, loss_sum, grad))
        return _weights(*self.server.collect(worker, self._snapshot))

    def _snapshot(self) -> Tensor:
        assert self._master is not None
        return self._master.to(self.group.param_dtype, copy=True)

    # -- the worker's step
    # --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        super().begin()
        if self._resting:
            self._resting = False
            self._exchange(Message(JOIN))

    def reduce(self) -> None:
        """Nothing is summed here: what leaves this rank leaves it in `update`."""

    def squared_norm(self, weight: Weight | None = None) -> Tensor:
        """Of this rank's own gradient, over all keys."""
        return squared_norm(
            (state.grad for state in self.states if state.grad is not None), self.group.device
        )

    def total(self, scalars: Tensor, axis: Axis) -> None:
        """They stay here; loss and count go to the servers with the gradients."""
        self._scalars = (float(scalars[0]), float(scalars[1]))

    def update(self, change: Change) -> None:
        """Push this rank's gradients, clipped by their own norm, and fetch the weights."""
        loss_sum, count = self._scalars
        clip = change.factor * count
        if clip != 1.0:
            for state in self.states:
                assert state.grad is not None
                state.grad.mul_(clip)
        self._exchange(Message(PUSH, (float(change.step), count, loss_sum)))

    def end_step(self) -> None:
        """The weights have come already."""
        if self._service is not None:
            sent = self._service.take_sent_bytes()
            if sent:
                self.group.axis.ledger.add(self.group.axis.name, "pull", sent)

    def _exchange(self, question: Message) -> None:
        """Ask the servers; where only a connection broke, come back by a new one, without this
        gradient.
        """
        try:
            self._ask_all(question)
        except RankFailed:
            self._call()  # raises it again where a server is gone
            if self.server is not None:
                self.server.leave(self._own)
                self.server.forget(self._own)
            self._ask_all(Message(JOIN))
            self._receipts = [replace(receipt, staleness=REFUSED) for receipt in self._receipts]

    def _call(self) -> None:
        """A line to every other server; who had one before comes back."""
        patience_seconds = 2 * self.group.asynchrony.patience_seconds + 60
        for line in self._lines:
            if line is not None:
                line.close()
        self._lines = [
            None if rank == self._own else Line(address, self._own, patience_seconds)
            for rank, address in zip(self._rank_of_server, self._addresses, strict=True)
        ]

    def _ask_all(self, question: Message) -> None:
        """Ask every server before any is waited for: two servers that wait for each other's worker
        would wait for ever.
        """
        axis = self.group.axis
        worker = self._own
        grads = [state.grad if question.kind == PUSH else None for state in self.states]
        for line, grad in zip(self._lines, grads, strict=True):
            if line is None and grad is not None:
                assert self.server is not None
                step, count, loss_sum = question.numbers
                self.server.push(worker, Push(int(step), count, loss_sum, grad))
            elif line is not None:
                line.ask(Message(question.kind, question.numbers, grad))
                if grad is not None:
                    axis.ledger.add(axis.name, "push", grad.numel() * grad.element_size())
        self._receipts = []
        for line, flat in zip(self._lines, self._flats, strict=True):
            if line is not None:
                self._receipts.append(_receipt(line.answer(flat)))
            else:
                assert self.server is not None
                wait = self.server.collect if question.kind == PUSH else self.server.join
                receipt, weights = wait(worker, self._snapshot)
                flat.copy_(weights)
                self._receipts.append(receipt)

    def tell(self, loss_sum: float, count: float) -> Told:
        """What the first server has applied since this rank last heard of it: of all workers."""
        if not self._receipts:
            return Told(loss_sum, count, int(count))
        receipt, (heard_loss, heard_tokens) = self._receipts[0], self._heard
        self._heard = (receipt.loss_sum, receipt.tokens)
        tokens = receipt.tokens - heard_tokens
        if tokens <= 0:
            return Told(loss_sum, count, 0)
        return Told(receipt.loss_sum - heard_loss, tokens, int(tokens))

    def details(self) -> dict[str, float]:
        """`staleness`: the largest among the servers; -1 when the gradient came too late and was
        not used.
        """
        ages = [receipt.staleness for receipt in self._receipts]
        return {"staleness": float(min(ages) if min(ages) < 0 else max(ages))} if ages else {}

    def rest(self) -> None:
        """Nobody need wait for this worker; its next step begins by fetching the weights.

        A server that is gone waits for nobody: that is for the next step to say.
        """
        if self._resting:
            return
        self._resting = True
        lines = [line for line in self._lines if line is not None]
        for line in lines:
            with suppress(RankFailed):
                line.ask(Message(REST))
        for line in lines:
            with suppress(RankFailed):
                line.answer()
        if self.server is not None:
            self.server.leave(self._own)

    def settle(self) -> None:
        """Rest, and wait until all do. Collective."""
        self.rest()
        if self.group.crew is not None:
            self.group.crew.together(lambda meeting: None)
        else:
            self.group.axis.barrier()

    def staleness(self) -> Counter[int]:
        return Counter() if self.server is None else self.server.histogram

    def close(self) -> None:
        for line in self._lines:
            if line is not None:
                line.close()
        if self._service is not None:
            self._service.close()

    @property
    def replicas(self) -> Replicas:
        return Replicas(1, 0)

    def live_tensors(self) -> dict[str, list[Tensor]]:
        return {
            "parameters": list(self._flats),
            "gradients": [state.grad for state in self.states if state.grad is not None],
            "optimizer": [] if self._master is None else [self._master],
        }


def async_server(units: Sequence[Unit], group: DataGroup) -> DataStrategy:
    """`dpN:async-server,staleK`. With K = 0, or alone, all wait for all: that is the synchronous
    server.
    """
    num_workers = group.axis.size if group.crew is None else group.crew.num_seats
    if group.asynchrony.stale == 0 or num_workers == 1:
        return ParameterServer(units, group)
    return AsyncServer(units, group)


def _stays(state: BucketState) -> None:
    """Gradients wait here until the whole step is done."""


def _weights(receipt: Receipt, weights: Tensor) -> Message:
    return Message(
        WEIGHTS,
        (receipt.version, receipt.staleness, receipt.loss_sum, receipt.tokens, receipt.steps),
        weights,
    )


def _receipt(answer: Message) -> Receipt:
    version, staleness, loss_sum, tokens, steps = answer.numbers[:5]
    return Receipt(int(version), int(staleness), loss_sum, tokens, int(steps))
