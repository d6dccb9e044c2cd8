"""A rendezvous for ranks that come and go: a barrier of those present, and one list of them for
all.

A process group has no such thing. Its ranks are fixed when it is made, and one that dies breaks it.
So the process that started the ranks keeps the list, over connections that end with their rank.
A rank has a *worker id*, its number among all that may ever come. Two questions are answered:

    meet     wait until every awaited rank has come; the answer lists all of them, and the newcomers
    agree    wait until everybody of the last round has said how it went; then whether it went
             well for all

All ids are awaited at first. Later the members of the last round are, and those that have said
that they are here. Who is lost is not awaited any more, nor who comes later than `patience_seconds`
after one of the last round.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from plait.comm.calls import Address, CallMessage, Connection, Service
from plait.errors import RankFailed

ANNOUNCE, MEET, AGREE = range(3)
ABSENT, NEW, OLD = range(3)
LOOK_SECONDS = 0.5
FOREVER_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class RendezvousRound:
    """The ids that met, ascending, and those of them that were not at the round before."""

    number: int
    members: tuple[int, ...]
    newcomers: frozenset[int]


class RendezvousState:
    """The state of a rendezvous. Its methods are called from one thread for each worker, and block
    it.
    """

    def __init__(self, num_workers: int, patience_seconds: float = 120.0) -> None:
        self._patience_seconds = patience_seconds
        self._number = 0
        self._members: set[int] = set()
        self._newcomers: frozenset[int] = frozenset()
        self._awaited = set(range(num_workers))
        self._come: dict[int, bool] = {}  # and whether newcomers may be let in
        self._said: dict[int, bool] = {}
        self._answers: dict[
            int, RendezvousRound | None
        ] = {}  # answers that their workers have not taken yet
        self._verdicts: dict[int, bool] = {}
        self._lives = (
            [0] * num_workers
        )  # how often each worker was lost: who waits for one of an earlier life waits no more
        self._changed = threading.Condition()

    def announce(self, worker: int) -> None:
        """Note that the worker will come to the next round."""
        with self._changed:
            self._awaited.add(worker)

    def lost(self, worker: int) -> None:
        """Whether the rendezvous has stopped waiting for this rank."""
        with self._changed:
            for known in (self._come, self._said, self._answers, self._verdicts):
                known.pop(worker, None)
            self._awaited.discard(worker)
            self._members.discard(worker)
            self._lives[worker] += 1
            self._look()

    def meet(self, worker: int, opens: bool = True) -> RendezvousRound | None:
        """Wait for the others. Where one of the last round says not `opens`, newcomers wait for
        the next one.

        None when none of the last round is left: what they knew is lost. Raises
        `ConnectionError` when the worker is lost.
        """
        with self._changed:
            life = self._lives[worker]
            self._awaited.add(worker)
            self._come[worker] = opens
            deadline = time.monotonic() + self._patience_seconds
            self._look()
            while worker not in self._answers:
                self._wait(worker, life)
                if time.monotonic() > deadline and (worker in self._members or not self._number):
                    self._awaited &= self._come.keys()
                    self._look()
            return self._answers.pop(worker)

    def agree(self, worker: int, well: bool) -> bool:
        """Wait for the others of the last round; whether all of those that are left say that it
        went well.

        Raises `ConnectionError` when the worker is lost.
        """
        with self._changed:
            life = self._lives[worker]
            self._said[worker] = well
            self._look()
            while worker not in self._verdicts:
                self._wait(worker, life)
            return self._verdicts.pop(worker)

    def _wait(self, worker: int, life: int) -> None:
        self._changed.wait(LOOK_SECONDS)
        if self._lives[worker] != life:
            raise ConnectionError(f"worker {worker} is lost")

    def _look(self) -> None:
        """Answer whom one can."""
        incumbents = self._members & self._awaited
        if self._said and incumbents <= self._said.keys():
            verdict = all(self._said[worker] for worker in incumbents)
            if (
                not verdict and self._members != self._newcomers
            ):  # they may have missed their answer
                self._members -= self._newcomers
            self._verdicts.update(dict.fromkeys(self._said, verdict))
            self._said.clear()
        if self._number and not incumbents:
            self._answers.update(dict.fromkeys(self._come))
            self._come.clear()
        elif self._come and incumbents <= self._come.keys():
            opens = all(self._come[worker] for worker in incumbents)
            if not opens:
                self._hold(incumbents)
            elif self._awaited <= self._come.keys():
                self._hold(set(self._come))
        self._changed.notify_all()

    def _hold(self, workers: set[int]) -> None:
        self._number += 1
        round_ = RendezvousRound(
            self._number, tuple(sorted(workers)), frozenset(workers - self._members)
        )
        self._members = workers
        self._newcomers = round_.newcomers
        for worker in workers:
            del self._come[worker]
            self._answers[worker] = round_


class RendezvousServer:
    """Keeps the list for ranks that call from other processes; see `RendezvousClient`."""

    def __init__(
        self, num_workers: int, patience_seconds: float = 120.0, host: str = "127.0.0.1"
    ) -> None:
        self._num_seats = num_workers
        self.state = RendezvousState(num_workers, patience_seconds)
        self._service = Service(self._answer, self.state.lost, host)

    @property
    def address(self) -> Address:
        """Where members call."""
        return self._service.address

    def close(self) -> None:
        """End every connection."""
        self._service.close()

    def _answer(self, worker: int, question: CallMessage) -> CallMessage:
        if question.kind == ANNOUNCE:
            self.state.announce(worker)
            return CallMessage(ANNOUNCE)
        if question.kind == AGREE:
            return CallMessage(AGREE, (float(self.state.agree(worker, bool(question.numbers[0]))),))
        round_ = self.state.meet(worker, bool(question.numbers[0]))
        workers = torch.full((self._num_seats,), ABSENT, dtype=torch.int8)
        if round_ is not None:
            for member in round_.members:
                workers[member] = NEW if member in round_.newcomers else OLD
        return CallMessage(MEET, (0.0 if round_ is None else float(round_.number),), workers)


class RendezvousClient:
    """One rank's connection to the rendezvous; when it ends, the rank is lost."""

    def __init__(self, address: Address, worker: int, num_workers: int) -> None:
        self._num_seats = num_workers
        self._connection = Connection(address, worker, FOREVER_SECONDS)

    def announce(self) -> None:
        """Have others wait for this rank at their next round."""
        self._connection.ask(CallMessage(ANNOUNCE))
        self._connection.answer()

    def meet(self, opens: bool = True) -> RendezvousRound:
        """See `RendezvousState.meet`. Raises `RankFailed` when no one is left who knows how far the
        run is.
        """
        self._connection.ask(CallMessage(MEET, (float(opens),)))
        workers = torch.zeros(self._num_seats, dtype=torch.int8)
        number = int(self._connection.answer(workers).numbers[0])
        if not number:
            raise RankFailed("the ranks that this one was to join have ended")
        kinds = workers.tolist()
        present = tuple(worker for worker, kind in enumerate(kinds) if kind != ABSENT)
        return RendezvousRound(
            number, present, frozenset(worker for worker in present if kinds[worker] == NEW)
        )

    def agree(self, well: bool) -> bool:
        """See `RendezvousState.agree`."""
        self._connection.ask(CallMessage(AGREE, (float(well),)))
        return bool(self._connection.answer().numbers[0])

    def close(self) -> None:
        """Leave."""
        self._connection.close()
