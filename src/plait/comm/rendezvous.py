"""A rendezvous for ranks that come and go: a barrier of those present, and one list of them for
all.

A process group has no such thing. Its ranks are fixed when it is made, and one that dies breaks it.
So the list is kept outside, by whoever started the ranks, over connections that end with their
rank. A rank has a *seat*, its number among all that may ever come. Two questions are answered:

    meet     wait until every awaited rank has come; the answer lists all of them, and the newcomers
    agree    wait until everybody of the last meeting has said how it went; then whether it went
    well for all

All ids are awaited at first. Later the members of the last meeting are, and those that have said
that they are here. Who is lost is not awaited any more, nor who comes later than `patience_seconds`
after somebody of the last meeting.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from plait.comm.calls import Address, CallMessage, Connection, Service
from plait.errors import RankFailed

HERE, MEET, AGREE = range(3)
ABSENT, NEW, OLD = range(3)
LOOK_SECONDS = 0.5
FOREVER_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class RendezvousRound:
    """The seats that met, ascending, and those of them that were not at the meeting before."""

    number: int
    members: tuple[int, ...]
    newcomers: frozenset[int]


class RendezvousState:
    """The state of a rendezvous. Its methods are called from one thread for each seat, and block
    it.
    """

    def __init__(self, num_seats: int, patience_seconds: float = 120.0) -> None:
        self._patience_seconds = patience_seconds
        self._number = 0
        self._members: set[int] = set()
        self._newcomers: frozenset[int] = frozenset()
        self._awaited = set(range(num_seats))
        self._come: dict[int, bool] = {}  # and whether newcomers may be let in
        self._said: dict[int, bool] = {}
        self._meetings: dict[
            int, RendezvousRound | None
        ] = {}  # answers that their seats have not taken yet
        self._verdicts: dict[int, bool] = {}
        self._lives = (
            [0] * num_seats
        )  # how often each seat was lost: who waits for one of an earlier life waits no more
        self._changed = threading.Condition()

    def here(self, seat: int) -> None:
        """The seat will come to the next meeting."""
        with self._changed:
            self._awaited.add(seat)

    def lost(self, seat: int) -> None:
        """Whether the rendezvous has stopped waiting for this rank."""
        with self._changed:
            for known in (self._come, self._said, self._meetings, self._verdicts):
                known.pop(seat, None)
            self._awaited.discard(seat)
            self._members.discard(seat)
            self._lives[seat] += 1
            self._look()

    def meet(self, seat: int, opens: bool = True) -> RendezvousRound | None:
        """Wait for the others. Where one of the last meeting says not `opens`, newcomers wait for
        the next one.

        None when nobody of the last meeting is left: what they knew is lost. Raises
        `ConnectionError` when the seat is lost.
        """
        with self._changed:
            life = self._lives[seat]
            self._awaited.add(seat)
            self._come[seat] = opens
            deadline = time.monotonic() + self._patience_seconds
            self._look()
            while seat not in self._meetings:
                self._wait(seat, life)
                if time.monotonic() > deadline and (seat in self._members or not self._number):
                    self._awaited &= self._come.keys()
                    self._look()
            return self._meetings.pop(seat)

    def agree(self, seat: int, well: bool) -> bool:
        """Wait for the others of the last meeting; whether all of those that are left say that it
        went well.

        Raises `ConnectionError` when the seat is lost.
        """
        with self._changed:
            life = self._lives[seat]
            self._said[seat] = well
            self._look()
            while seat not in self._verdicts:
                self._wait(seat, life)
            return self._verdicts.pop(seat)

    def _wait(self, seat: int, life: int) -> None:
        self._changed.wait(LOOK_SECONDS)
        if self._lives[seat] != life:
            raise ConnectionError(f"seat {seat} is lost")

    def _look(self) -> None:
        """Answer whom one can."""
        elders = self._members & self._awaited
        if self._said and elders <= self._said.keys():
            verdict = all(self._said[seat] for seat in elders)
            if (
                not verdict and self._members != self._newcomers
            ):  # what these were to be told they may not have heard
                self._members -= self._newcomers
            self._verdicts.update(dict.fromkeys(self._said, verdict))
            self._said.clear()
        if self._number and not elders:
            self._meetings.update(dict.fromkeys(self._come))
            self._come.clear()
        elif self._come and elders <= self._come.keys():
            opens = all(self._come[seat] for seat in elders)
            if not opens:
                self._hold(elders)
            elif self._awaited <= self._come.keys():
                self._hold(set(self._come))
        self._changed.notify_all()

    def _hold(self, seats: set[int]) -> None:
        self._number += 1
        meeting = RendezvousRound(
            self._number, tuple(sorted(seats)), frozenset(seats - self._members)
        )
        self._members = seats
        self._newcomers = meeting.newcomers
        for seat in seats:
            del self._come[seat]
            self._meetings[seat] = meeting


class RendezvousServer:
    """Keeps the list for ranks that call from other processes; see `RendezvousClient`."""

    def __init__(
        self, num_seats: int, patience_seconds: float = 120.0, host: str = "127.0.0.1"
    ) -> None:
        self._num_seats = num_seats
        self.attendance = RendezvousState(num_seats, patience_seconds)
        self._service = Service(self._answer, self.attendance.lost, host)

    @property
    def address(self) -> Address:
        """Where members call."""
        return self._service.address

    def close(self) -> None:
        """End every connection."""
        self._service.close()

    def _answer(self, seat: int, question: CallMessage) -> CallMessage:
        if question.kind == HERE:
            self.attendance.here(seat)
            return CallMessage(HERE)
        if question.kind == AGREE:
            return CallMessage(
                AGREE, (float(self.attendance.agree(seat, bool(question.numbers[0]))),)
            )
        meeting = self.attendance.meet(seat, bool(question.numbers[0]))
        seats = torch.full((self._num_seats,), ABSENT, dtype=torch.int8)
        if meeting is not None:
            for member in meeting.members:
                seats[member] = NEW if member in meeting.newcomers else OLD
        return CallMessage(MEET, (0.0 if meeting is None else float(meeting.number),), seats)


class RendezvousClient:
    """One rank's connection to the roster; when it ends, the rank is lost."""

    def __init__(self, address: Address, seat: int, num_seats: int) -> None:
        self._num_seats = num_seats
        self._line = Connection(address, seat, FOREVER_SECONDS)

    def here(self) -> None:
        """Have others wait for this rank at their next meeting."""
        self._line.ask(CallMessage(HERE))
        self._line.answer()

    def meet(self, opens: bool = True) -> RendezvousRound:
        """See `RendezvousState.meet`. Raises `RankFailed` when nobody is left who knows how far the
        run is.
        """
        self._line.ask(CallMessage(MEET, (float(opens),)))
        seats = torch.zeros(self._num_seats, dtype=torch.int8)
        number = int(self._line.answer(seats).numbers[0])
        if not number:
            raise RankFailed("the ranks that this one was to join have ended")
        kinds = seats.tolist()
        present = tuple(seat for seat, kind in enumerate(kinds) if kind != ABSENT)
        return RendezvousRound(
            number, present, frozenset(seat for seat in present if kinds[seat] == NEW)
        )

    def agree(self, well: bool) -> bool:
        """See `RendezvousState.agree`."""
        self._line.ask(CallMessage(AGREE, (float(well),)))
        return bool(self._line.answer().numbers[0])

    def close(self) -> None:
        """Leave."""
        self._line.close()
