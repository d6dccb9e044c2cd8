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
VARIABLE = "PLAIT_RENDEZVOUS"


@dataclass(frozen=True)
class RendezvousPlace:
    """Where a rank finds the others: its id among `num_workers`, the rendezvous, and a store."""

    worker: int
    num_workers: int
    rendezvous: Address
    store: tuple[str, int]

    def as_variables(self) -> dict[str, str]:
        """The variables by which a new process finds the others."""
        return {
            "RANK": str(self.worker),
            "LOCAL_RANK": str(self.worker),
            "WORLD_SIZE": str(self.num_workers),
            "MASTER_ADDR": self.store[0],
            "MASTER_PORT": str(self.store[1]),
            VARIABLE: self.rendezvous.as_text(),
        }

    @staticmethod
    def from_variables(variables: Mapping[str, str] | None = None) -> RendezvousPlace | None:
        """The place that `variables` tell of; None in a world whose ranks are fixed."""
        variables = os.environ if variables is None else variables
        if VARIABLE not in variables:
            return None
        address = Address.of_text(variables[VARIABLE])
        return RendezvousPlace(
            int(variables["RANK"]),
            int(variables["WORLD_SIZE"]),
            address,
            (variables["MASTER_ADDR"], int(variables["MASTER_PORT"])),
        )


class Membership:
    """This rank's worker id, and whom it has met."""

    def __init__(
        self,
        place: RendezvousPlace,
        timeout_seconds: float,
        regroup: Callable[[tuple[int, ...]], None],
    ) -> None:
        self.worker = place.worker
        self.num_workers = place.num_workers
        self._place, self._timeout, self._regroup = (
            place,
            timedelta(seconds=timeout_seconds),
            regroup,
        )
        self._member: RendezvousClient | None = None
        self._kept: Store | None = None
        self._members: tuple[int, ...] = ()
        self._is_in = False
        self.joined_late = False  # whether others had met before this rank's first round
        self.saved_step = -1  # of the newest checkpoint that this rank took part in

    def note_save(self, step: int) -> None:
        """This rank took part in the checkpoint of a step."""
        self.saved_step = step

    def announce(self) -> None:
        """Have others wait for this rank when they meet."""
        self._known().announce()

    def together(
        self,
        act: Callable[[RendezvousRound], T],
        opens: bool = True,
        undo: Callable[[], None] = lambda: None,
    ) -> T:
        """Meet the ranks that are there, and act with them; again, after `undo`, without those
        that are lost in it.

        While `act` runs the world's axes are those of the ranks that met, and they stay so. Not
        `opens` admits no rank that was not at the round before. Raises `RankFailed` when this rank
        is too late. Collective of those that are there.
        """
        while True:
            round_ = self._meet(opens)
            results = []
            try:
                self._join(round_)
                results.append(act(round_))
            except RankFailed:
                # a rank that still waits in the group for a rank that is gone is set free by that
                self._drop_group()
            if self._known().agree(bool(results)):
                if not self._is_in:
                    self.joined_late = set(round_.members) != round_.newcomers
                self._is_in = True
                return results[0]
            self._drop_group()  # on every rank, for a group is made by all of its members
            undo()

    def set_word(self, name: str, text: str) -> None:
        """Leave a word that every rank finds."""
        self._store().set(f"word/{name}", text)

    def has_word(self, name: str) -> bool:
        """Whether the word has been left."""
        return bool(self._store().check([f"word/{name}"]))

    def wait_for_word(self, name: str) -> str:
        """The word, as soon as a rank has left it."""
        return str(self._store().get(f"word/{name}").decode())

    def close(self) -> None:
        """Leave for good."""
        self._leave()
        if self._member is not None:
            self._member.close()

    def _known(self) -> RendezvousClient:
        if self._member is None:
            self._member = RendezvousClient(self._place.rendezvous, self.worker, self.num_workers)
        return self._member

    def _store(self) -> Store:
        if self._kept is None:
            host, port = self._place.store
            self._kept = TCPStore(host, port, is_master=False, timeout=self._timeout)
        return self._kept

    def _meet(self, opens: bool) -> RendezvousRound:
        round_ = self._known().meet(opens)
        if self._is_in and self.worker in round_.newcomers:
            raise RankFailed(
                f"rank {self.worker} came too late; the others have gone on without it"
            )
        return round_

    def _join(self, round_: RendezvousRound) -> None:
        if self._members == round_.members and not round_.newcomers:
            return
        self._leave()
        self._connect(round_)
        self._members = round_.members
        self._regroup(round_.members)

    def _connect(self, round_: RendezvousRound) -> None:
        members = round_.members
        if len(members) == 1:
            return
        store = PrefixStore(f"round/{round_.number}", self._store())
        rank = members.index(self.worker)
        try:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=len(members), timeout=self._timeout
            )
        except RuntimeError as error:  # one of them has died since
            raise RankFailed(
                f"the ranks {list(members)} have met and cannot reach each other: {error}"
            ) from error

    def _drop_group(self) -> None:
        self._leave()
        self._members = ()

    def _leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
