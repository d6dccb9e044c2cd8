"""The worker's side of the asynchronous parameter server: push gradients, fetch weights.

Every rank is a worker. The first `num_servers` of them (all, by default) also serve, each from
threads of its own. So a server answers while its own worker computes. Keys are spread over the
servers by bytes, as under `server`. A step of a worker sends its gradients to every server and gets
the weights back. Each server decides by itself when (`staleness`, `key_server`). So the weights of
a step may be of different versions on different servers, none of them too old.

A worker sends the keys of all servers but itself, a server its keys to each other worker that
pushes: the bytes of the synchronous server, without its waiting. With K = 0 it *is* the synchronous
server.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from plait.comm import Axis
from plait.comm.calls import Address, CallMessage, Connection, Service
from plait.comm.membership import Membership
from plait.comm.network import own_host
from plait.errors import RankFailed, RunError
from plait.outer.async_server.key_server import REFUSED, KeyServer, Push, Receipt
from plait.outer.async_server.weights import KeyedWeights, packed, unused_slots
from plait.outer.driver import Change, Driver, StepReport
from plait.outer.options import Asynchrony
from plait.parallel.data.strategy import OptimizerShard

PUSH, JOIN, REST, WEIGHTS = range(4)


class AsyncServerDriver(Driver):
    """`dpN:async-server,staleK` with K above 0."""

    is_synchronous = False

    def __init__(
        self,
        weights: KeyedWeights,
        make_update: Callable[[Change], None],
        asynchrony: Asynchrony,
    ) -> None:
        """Serve the keys of this rank, and connect to the other servers. Collective."""
        self.first_step = 0
        self._weights = weights
        self._group = weights.group
        self._worker = weights.group.worker
        self._patience_seconds = 2 * asynchrony.patience_seconds + 60
        self._service: Service | None = None
        self._lines: list[Connection | None] = []
        self._addresses: list[Address] = []
        self._is_away = False
        self._scalars = (0.0, 0.0)
        self._receipts: list[Receipt] = []
        self._reported = (0.0, 0.0)
        self.server: KeyServer | None = None
        if weights.served_grad is not None:
            num_workers = weights.group.num_workers

            def update(change: Change, unused: frozenset[int]) -> None:
                weights.bind_gradients(unused)
                make_update(change)

            self.server = KeyServer(
                num_workers, self._worker, asynchrony, weights.served_grad, update
            )
        if self._group.membership is not None:
            self._join(self._group.membership)
        else:
            self._connect_all()

    # -- serving
    # ----------------------------------------------------------------------------------------------

    def _connect_all(self) -> None:
        """Exchange the addresses of all servers, and connect to them. Collective."""
        axis = self._group.axis
        hosts = axis.gather_objects(socket.gethostname())
        self._serve(own_host(same_host=len(set(hosts)) == 1))
        addresses = axis.gather_objects(None if self._service is None else self._service.address)
        self._addresses = [addresses[rank] for rank in self._weights.server_ranks]
        self._connect()

    def _serve(self, host: str) -> None:
        if self.server is not None:
            self._service = Service(self._answer, self.server.leave, host)

    def _join(self, membership: Membership) -> None:
        """Exchange addresses through words that every rank finds.

        A worker that returns begins where the others are now.
        """
        came = f"rank {self._worker} came"
        address_of = "server {}"
        if membership.has_word(came) and self.server is not None:
            raise RunError(
                f"rank {self._worker} served keys, which were lost with it; go on from a checkpoint"
            )
        self._serve(own_host(same_host=True))
        if self._service is not None:
            membership.set_word(address_of.format(self._worker), self._service.address.as_text())
        self._addresses = [
            Address.of_text(membership.wait_for_word(address_of.format(rank)))
            for rank in self._weights.server_ranks
        ]
        membership.announce()
        self._connect()
        if membership.has_word(came):
            self._ask_all(CallMessage(JOIN))
            self.first_step = max(receipt.steps for receipt in self._receipts)
        membership.set_word(came, "")

    def _answer(self, worker: int, question: CallMessage) -> CallMessage:
        """Answer a worker. Called in threads of the service."""
        assert self.server is not None
        if question.kind == REST:
            self.server.leave(worker)
            return CallMessage(REST)
        if question.kind == JOIN:
            return _weights(*self.server.join(worker, self._snapshot))
        assert question.data is not None
        step, count, loss_sum = question.numbers[:3]
        grad, unused = self._weights.unpacked(question.data)
        self.server.push(worker, Push(int(step), count, loss_sum, grad, unused))
        return _weights(*self.server.collect(worker, self._snapshot))

    def _snapshot(self) -> Tensor:
        assert self._weights.master is not None
        return self._weights.master.to(self._group.param_dtype, copy=True)

    # -- the worker's step
    # ----------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Fetch the weights, if this worker was away."""
        if self._is_away:
            self._is_away = False
            self._exchange(CallMessage(JOIN))

    def sum_totals(self, totals: Tensor, axis: Axis) -> None:
        """Keep the totals here: loss and count go to the servers with the gradients."""
        self._scalars = (float(totals[0]), float(totals[1]))

    def apply(self, change: Change) -> None:
        """Push this rank's gradients, clipped by their own norm, and fetch the weights."""
        loss_sum, count = self._scalars
        clip = change.factor * count
        if clip != 1.0:
            for state in self._weights.states:
                assert state.grad is not None
                state.grad.mul_(clip)
        self._exchange(CallMessage(PUSH, (float(change.step), count, loss_sum)))
        if self._service is not None:
            sent = self._service.take_sent_bytes()
            if sent:
                self._group.axis.ledger.add(self._group.axis.name, "pull", sent)

    def _exchange(self, question: CallMessage) -> None:
        """Ask the servers; where only a connection broke, return by a new one, without this
        gradient.
        """
        try:
            self._ask_all(question)
        except RankFailed:
            self._connect()  # raises it again where a server is gone
            if self.server is not None:
                self.server.leave(self._worker)
                self.server.forget(self._worker)
            self._ask_all(CallMessage(JOIN))
            self._receipts = [replace(receipt, staleness=REFUSED) for receipt in self._receipts]

    def _connect(self) -> None:
        """Connect to every other server; a worker that was connected before returns."""
        for line in self._lines:
            if line is not None:
                line.close()
        self._lines = [
            None
            if rank == self._worker
            else Connection(address, self._worker, self._patience_seconds)
            for rank, address in zip(self._weights.server_ranks, self._addresses, strict=True)
        ]

    def _ask_all(self, question: CallMessage) -> None:
        """Ask every server before waiting for any: two servers that wait for each other's worker
        would never end.
        """
        axis = self._group.axis
        worker = self._worker
        pushes = question.kind == PUSH
        for line, state in zip(self._lines, self._weights.states, strict=True):
            if line is None and pushes:
                assert self.server is not None and state.grad is not None
                step, count, loss_sum = question.numbers
                push = Push(int(step), count, loss_sum, state.grad, unused_slots(state))
                self.server.push(worker, push)
            elif line is not None:
                sent = packed(state) if pushes else None
                line.ask(CallMessage(question.kind, question.numbers, sent))
                if sent is not None:
                    axis.ledger.add(axis.name, "push", sent.nbytes)
        self._receipts = []
        for line, flat in zip(self._lines, self._weights.flats, strict=True):
            if line is not None:
                self._receipts.append(_receipt(line.answer(flat)))
            else:
                assert self.server is not None
                wait = self.server.collect if question.kind == PUSH else self.server.join
                receipt, weights = wait(worker, self._snapshot)
                flat.copy_(weights)
                self._receipts.append(receipt)

    def report(self, loss_sum: float, count: float) -> StepReport:
        """The loss of all workers, as far as the first server has applied it since the last
        report.
        """
        if not self._receipts:
            return StepReport(loss_sum, count, int(count))
        receipt = self._receipts[0]
        reported_loss, reported_tokens = self._reported
        self._reported = (receipt.loss_sum, receipt.tokens)
        tokens = receipt.tokens - reported_tokens
        if tokens <= 0:
            return StepReport(loss_sum, count, 0)
        return StepReport(receipt.loss_sum - reported_loss, tokens, int(tokens))

    def metrics(self) -> dict[str, float]:
        """`staleness`: the largest among the servers; -1 when the gradient came too late and was
        not used.
        """
        ages = [receipt.staleness for receipt in self._receipts]
        if not ages:
            return {}
        age = min(ages) if min(ages) < 0 else max(ages)
        return {"staleness": float(age)}

    def staleness(self) -> Counter[int]:
        return Counter() if self.server is None else self.server.histogram

    def extra_state(self, piece: OptimizerShard) -> dict[str, Tensor]:
        return {}

    def live_tensors(self) -> list[Tensor]:
        return []

    def restart(self) -> None:
        """Where ranks join and leave, the next step begins by fetching the weights."""
        self._is_away = self._is_away or self._group.membership is not None

    def leave(self) -> None:
        """No rank waits for this worker; its next step begins by fetching the weights.

        A server that is gone is reported by that next step.
        """
        if self._is_away:
            return
        self._is_away = True
        lines = [line for line in self._lines if line is not None]
        for line in lines:
            with suppress(RankFailed):
                line.ask(CallMessage(REST))
        for line in lines:
            with suppress(RankFailed):
                line.answer()
        if self.server is not None:
            self.server.leave(self._worker)

    def synchronize(self) -> None:
        """Leave, and wait until all workers have. Collective."""
        self.leave()
        if self._group.membership is not None:
            self._group.membership.together(lambda round_: None)
        else:
            self._group.axis.barrier()

    def close(self) -> None:
        for line in self._lines:
            if line is not None:
                line.close()
        if self._service is not None:
            self._service.close()


def _weights(receipt: Receipt, weights: Tensor) -> CallMessage:
    return CallMessage(
        WEIGHTS,
        (receipt.version, receipt.staleness, receipt.loss_sum, receipt.tokens, receipt.steps),
        weights,
    )


def _receipt(answer: CallMessage) -> Receipt:
    version, staleness, loss_sum, tokens, steps = answer.numbers[:5]
    return Receipt(int(version), int(staleness), loss_sum, tokens, int(steps))
