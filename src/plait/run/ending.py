"""The end of a run that a signal asks for: all ranks end before one step, and save.

A rank of torchrun agrees with its peers alone, so each step begins with a sum of one number. The
host of a GPU reads that sum before the next step. So nobody waits, and all ranks end a step later.
Ranks of plait's own launcher agree in shared memory instead (`plait.launcher.seat`), also those
that come and go.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from plait.comm import World
from plait.comm.network import on_one_machine
from plait.engine.sums import HostPages
from plait.launcher.board import GONE, Page
from plait.launcher.hearing import SIGNALS, Echoes, hear_beside
from plait.launcher.seat import POLITE_SECONDS
from plait.values import JsonObject

LINGER_SECONDS = 5.0


class Ending(Protocol):
    """The judge of whether a run ends before a step."""

    def ends_before(self, step: int, leave: Callable[[], None]) -> bool:
        """Whether all ranks end before this step, counted from 0. Collective.

        `leave()` is called before this rank waits for others that may wait for its steps.
        """

    def starts_again(self) -> bool:
        """Whether ranks that have done their steps are to be started once more. Collective."""

    @property
    def signal(self) -> int:
        """The signal that asks for the end; 0 for none."""

    @property
    def known_signal(self) -> int:
        """The signal that this rank knows of, and others may not yet; 0 for none."""


def one_is_asked(ending: Ending, world: World) -> bool:
    """Whether any rank knows of a signal, so that all leave off alike. Collective."""
    asked = torch.full((1,), float(ending.known_signal), device=world.device)
    world.axis("world").all_reduce(asked, control=True).wait()
    return bool(asked.item())


def signal_of_all(ending: Ending, world: World) -> int:
    """The signal that any rank knows of, alike on every rank; 0 for none. Collective."""
    return max(world.axis("world").gather_objects(ending.known_signal))


def stopped(world: World, step: int, ending: Ending, is_left_off: bool) -> JsonObject:
    """The numbers of a run that a signal ends; it may have come in the last evaluation."""
    signal_of_end = signal_of_all(ending, world) if is_left_off else ending.signal
    world.close()
    return {"stopped": step, "signal": signal_of_end}


class EndByPeers:
    """The ending of a rank that torchrun has started. The second signal ends the rank at once.

    An agent of torchrun signals its own ranks before it starts them again. Those of other machines
    may be earlier. So the word of a peer is no signal of this rank's own.

    A thread hears the signals, since Python runs no handler while native code waits for a peer.
    A rank that waits for its peers to come has nothing to save: the first signal ends it soon.
    """

    def __init__(self, deadline_seconds: float, *, reads_later: bool | None = None) -> None:
        """`reads_later`: the host reads each sum one step later. None: where it is no processor."""
        self.signal = 0
        self._reads_later = reads_later
        self._earlier: Callable[[], list[float]] | None = None
        self._is_heard = False
        self._echoes = Echoes()
        self._deadline_seconds = deadline_seconds
        self._world: World | None = None
        hear_beside(self._hear)

    def of(self, world: World) -> EndByPeers:
        """The ending of the ranks of a world."""
        self._world = world
        self._pages = HostPages(world.device)
        return self

    @property
    def known_signal(self) -> int:
        """The signal that this rank knows of; 0 for none."""
        return self.signal

    def ends_before(self, step: int, leave: Callable[[], None]) -> bool:
        assert self._world is not None
        later = self._reads_later
        if later is None:
            later = self._world.device.type != "cpu"
        newest = self._ask()
        total, self._earlier = (self._earlier, newest) if later else (newest, None)
        return total is not None and self._hears(total)

    def _ask(self) -> Callable[[], list[float]]:
        """The sum [1] of the signals of all ranks, on its way to the host. Collective."""
        assert self._world is not None
        asked = torch.full((1,), float(self.signal), device=self._world.device)
        self._world.axis("world").all_reduce(asked, control=True).wait()
        return self._pages.send(asked)

    def _hears(self, total: Callable[[], list[float]]) -> bool:
        """Whether any rank has a signal, by a sum [1]. The time to save begins on this rank too."""
        is_asked = any(total())
        if is_asked and not self.signal:
            self._begin(signal.SIGTERM)
        return is_asked

    def starts_again(self) -> bool:
        """Whether an agent has signalled its ranks since the last step. Collective.

        A machine has come meanwhile. An agent whose ranks ended well would wait five minutes for
        one that starts its own again. On one machine no other can come.
        """
        return not on_one_machine(os.environ) and self._hears(self._ask())

    def linger(self) -> None:
        """Wait a moment for this rank's signal, where a peer's has ended the run.

        An agent whose rank ends before it is signalled takes that for a failure, and counts it
        among `--max-restarts`.
        """
        end = time.monotonic() + LINGER_SECONDS
        while self.signal and not self._is_heard and time.monotonic() < end:
            time.sleep(POLITE_SECONDS)

    def _hear(self, number: int, frame: object) -> None:
        if self._echoes.has(number):
            return
        if self._is_heard:
            os._exit(128 + number)
        self._is_heard = True
        if not self.signal:
            self._begin(number)
        if self._world is None:
            timer = threading.Timer(LINGER_SECONDS, self._leave_the_start)
            timer.daemon = True
            timer.start()

    def _leave_the_start(self) -> None:
        """End this rank if its peers are still missing."""
        if self._world is not None:
            return
        name = signal.Signals(self.signal).name
        sys.stderr.write(
            f"plait train: {name} came while this rank waited for others to come; nothing has "
            "begun, and nothing is saved\n"
        )
        sys.stderr.flush()
        os._exit(128 + self.signal)

    def _begin(self, number: int) -> None:
        """Give the run its time to end."""
        self.signal = number
        timer = threading.Timer(self._deadline_seconds, self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        name = signal.Signals(self.signal).name
        sys.stderr.write(
            f"plait train: {name} came, and no checkpoint was whole after "
            f"{self._deadline_seconds:g} s ([recovery] deadline_seconds)\n"
        )
        sys.stderr.flush()
        os._exit(1)


class EndOfMembers:
    """The ending of ranks that come and go, on a page that their launcher keeps.

    They end before one step, as if it were the last: ranks that are behind do all that others did.
    """

    def __init__(self, page: Page) -> None:
        self._board = page.open()
        self._rank = 0
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def of(self, world: World) -> EndOfMembers:
        """The ending of the ranks of a world."""
        assert world.membership is not None
        self._rank = world.membership.worker
        return self

    @property
    def signal(self) -> int:
        """The signal that asks for the end; 0 for none."""
        return self._board.signal

    @property
    def known_signal(self) -> int:
        """The signal that this rank knows of; 0 for none."""
        return self.signal

    def ends_before(self, step: int, leave: Callable[[], None]) -> bool:
        """Whether all ranks that are there end before this step, counted from 0."""
        board = self._board
        if not board.signal:
            board.begin(self._rank, step)
            return False
        leave()  # a server may hold the others' gradients up until this rank sends its next one
        board.wait_at(self._rank, step)
        while not self._all_wait(step):
            if any(board.begun(seat) >= step for seat in range(board.num_seats)):
                board.begin(self._rank, step)
                return False
            time.sleep(POLITE_SECONDS)
        return True

    def starts_again(self) -> bool:
        """Always false: the launcher starts no rank once one has a result."""
        return False

    def _all_wait(self, step: int) -> bool:
        board = self._board
        present = [seat for seat in range(board.num_seats) if board.begun(seat) != GONE]
        return all(board.waits_at(seat) == step for seat in present)

    def _hear(self, number: int, frame: object) -> None:
        self._board.ask_to_end(number)
