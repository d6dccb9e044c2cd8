"""The roll call: ranks that others have started meet, and a rank that stays away is named.

A rank costs three small messages to the store. A line on stderr comes only after `NOTICE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from plait.doctor.findings import say
from plait.errors import RankFailed, WorldSizeError, some_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NOTICE_SECONDS: Final = 10.0
_MOST_NAMES: Final = 8
_SIZE: Final = "roll/size"
_COUNT: Final = "roll/count"
_MET: Final = "roll/met"  # empty when all have come, else the sentence that ends every rank


@contextlib.contextmanager
def repeating_notice(line: Callable[[float], str | None], every_seconds: float) -> Iterator[None]:
    """Say a line, made of the seconds so far, every so often until the block ends.

    No line is said where there is none, or where the store that it asks is gone.
    """
    ended = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        while not ended.wait(every_seconds):
            with contextlib.suppress(RuntimeError):
                told = line(time.monotonic() - began)
                if told is not None and not ended.is_set():
                    say(told)

    threading.Thread(target=tell, name="plait-roll-call", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class RollCall:
    """The call of one rank among `size`, on the store where they meet."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def answer(self, timeout: timedelta, every_seconds: float = NOTICE_SECONDS) -> None:
        """Return when all ranks have come.

        Raises:
            WorldSizeError: the ranks were told different numbers of ranks.
            RankFailed: a rank did not come in time, or the store was lost.
        """
        try:
            self._register()
            self._wait(timeout, every_seconds)
        except dist.DistNetworkError as error:
            raise RankFailed(
                f"rank {self._rank} lost the store at which ranks meet before all had come; the "
                "process that keeps it (rank 0, or torchrun) has ended, and its own output says why"
            ) from error

    def _register(self) -> None:
        """Enter this rank. The last rank to enter tells the others that all have come."""
        store = self._store
        own = f"{self._size} {self._rank}"
        first = store.compare_set(_SIZE, "", own).decode().split()
        if int(first[0]) != self._size:
            sentence = (
                f"rank {first[1]} was told a world of {first[0]} ranks and rank {self._rank} one "
                f"of {self._size}; WORLD_SIZE must be alike on all ranks"
            )
            store.set(_MET, sentence)
            raise WorldSizeError(sentence)
        if store.add(_place(self._rank), 1) == 1 and store.add(_COUNT, 1) == self._size:
            store.set(_MET, "")

    def _wait(self, timeout: timedelta, every_seconds: float) -> None:
        try:
            with repeating_notice(self._notice, every_seconds):
                self._store.wait([_MET], timeout)
        except dist.DistStoreError as error:  # the time is over
            line = self._absence(self._store, timeout.total_seconds())
            raise RankFailed(f"{line}; the time to come is over") from error
        if sentence := self._store.get(_MET).decode():
            raise WorldSizeError(sentence)

    def _notice(self, seconds: float) -> str | None:
        """The line of the first rank that is here; None for the others.

        It has a connection of its own: that of the rank is taken by its wait.
        """
        store: Store = self._store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        if any(store.check([_place(rank)]) for rank in range(self._rank)):
            return None
        return self._absence(store, seconds)

    def _absence(self, store: Store, seconds: float) -> str:
        """`rank 0 has been waiting for rank 1 to come for 10 s: 1 of 2 ranks are here`."""
        absent = [one for one in range(self._size) if not store.check([_place(one)])]
        here = self._size - len(absent)
        waits = f"rank {self._rank} has been waiting for {seconds:.0f} s"
        line = f"{waits} for {_ranks(absent)} to come: {here} of {self._size} ranks are here"
        present = (one for one in range(self._size) if one not in set(absent))
        twice = [one for one in present if store.add(_place(one), 0) > 1]
        return f"{line}, {_ranks(twice)} more than once (RANK must differ)" if twice else line


def _place(rank: int) -> str:
    return f"roll/rank/{rank}"


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 1, 3`, or the first ranks of many."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {some_of(ranks, _MOST_NAMES)}"
