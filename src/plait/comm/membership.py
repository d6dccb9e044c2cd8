"""One rank's view of a world whose ranks come and go: the present members and their process group.

Such a world begins apart: every rank builds what it has by itself. `Membership.together` meets the
others and puts the world's axes on a new process group of those that met. Where that breaks it is
dropped, and they meet again. Only strategies whose ranks do not step together can live so. The
launcher (`launch(..., restarts=K)`) keeps the rendezvous and a store. It tells each rank their
addresses in variables, as torchrun does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from plait.comm.calls import Address
from plait.comm.rendezvous import RendezvousClient, RendezvousRound
from plait.errors import RankFailed

T = TypeVar("T")
VARIABLE = "PLAIT_ROSTER"


@dataclass(frozen=True)
class RendezvousPlace:
    """Where a rank finds the others: its seat among `num_seats`, the roster, and a store."""

    seat: int
    num_seats: int
    roster: Address
    store: tuple[str, int]

    def as_variables(self) -> dict[str, str]:
        """The variables by which a new process finds the others."""
        return {
            "RANK": str(self.seat),
            "LOCAL_RANK": str(self.seat),
            "WORLD_SIZE": str(self.num_seats),
            "MASTER_ADDR": self.store[0],
            "MASTER_PORT": str(self.store[1]),
            VARIABLE: self.roster.as_text(),
        }

    @staticmethod
    def told(variables: Mapping[str, str] | None = None) -> RendezvousPlace | None:
        """The place that `variables` tell of; None in a world whose ranks are fixed."""
        told = os.environ if variables is None else variables
        if VARIABLE not in told:
            return None
        address = Address.of_text(told[VARIABLE])
        return RendezvousPlace(
            int(told["RANK"]),
            int(told["WORLD_SIZE"]),
            address,
            (told["MASTER_ADDR"], int(told["MASTER_PORT"])),
        )


class Membership:
    """This rank's seat, and whom it has met."""

    def __init__(
        self,
        place: RendezvousPlace,
        timeout_seconds: float,
        regroup: Callable[[tuple[int, ...]], None],
    ) -> None:
        self.seat = place.seat
        self.num_seats = place.num_seats
        self._place, self._timeout, self._regroup = (
            place,
            timedelta(seconds=timeout_seconds),
            regroup,
        )
        self._member: RendezvousClient | None = None
        self._kept: Store | None = None
        self._members: tuple[int, ...] = ()
        self._is_in = False

    def here(self) -> None:
        """Have others wait for this rank when they meet."""
        self._known().here()

    def together(
        self,
        act: Callable[[RendezvousRound], T],
        opens: bool = True,
        undo: Callable[[], None] = lambda: None,
    ) -> T:
        """Meet whoever is there, and do something with them; again, after `undo`, without those
        that are lost in it.

        While `act` runs the world's axes are those of the ranks that met, and they stay so. Not
        `opens` lets nobody in who was not at the meeting before. Raises `RankFailed` when this rank
        is too late. Collective of those that are there.
        """
        while True:
            meeting = self._meet(opens)
            done = []
            try:
                self._join(meeting)
                done.append(act(meeting))
            except RankFailed:
                # whoever still waits in the group for a rank that is gone is set free by that
                self._leave()
                self._members = ()
            if self._known().agree(bool(done)):
                self._is_in = True
                return done[0]
            undo()

    def tell(self, name: str, text: str) -> None:
        """Leave a word that every rank finds."""
        self._store().set(f"word/{name}", text)

    def knows(self, name: str) -> bool:
        """Whether the word has been left."""
        return bool(self._store().check([f"word/{name}"]))

    def learn(self, name: str) -> str:
        """The word, as soon as somebody has left it."""
        return str(self._store().get(f"word/{name}").decode())

    def close(self) -> None:
        """Leave for good."""
        self._leave()
        if self._member is not None:
            self._member.close()

    def _known(self) -> RendezvousClient:
        if self._member is None:
            self._member = RendezvousClient(self._place.roster, self.seat, self.num_seats)
        return self._member

    def _store(self) -> Store:
        if self._kept is None:
            host, port = self._place.store
            self._kept = TCPStore(host, port, is_master=False, timeout=self._timeout)
        return self._kept

    def _meet(self, opens: bool) -> RendezvousRound:
        meeting = self._known().meet(opens)
        if self._is_in and self.seat in meeting.newcomers:
            raise RankFailed(f"rank {self.seat} came too late; the others have gone on without it")
        return meeting

    def _join(self, meeting: RendezvousRound) -> None:
        if self._members == meeting.members and not meeting.newcomers:
            return
        self._leave()
        self._connect(meeting)
        self._members = meeting.members
        self._regroup(meeting.members)

    def _connect(self, meeting: RendezvousRound) -> None:
        members = meeting.members
        if len(members) == 1:
            return
        store = PrefixStore(f"meeting/{meeting.number}", self._store())
        rank = members.index(self.seat)
        try:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=len(members), timeout=self._timeout
            )
        except RuntimeError as error:  # one of them has died since
            raise RankFailed(
                f"the ranks {list(members)} have met and cannot reach each other: {error}"
            ) from error

    def _leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
