"""A thread in every rank: it says that the interpreter is free, and for whom this rank waits long.

Waits leave the interpreter free, so the thread runs while the rank waits, over every transport.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from plait.doctor.findings import say
from plait.doctor.flight import FlightRecorder
from plait.doctor.hangs import awaited
from plait.doctor.record import Communication, RankSnapshot, Records, now, own_view

BEAT_SECONDS: Final = 0.25
NOTICE_SECONDS: Final = 5.0


class Pulse:
    """The thread of one rank. `recorder` gives its record, `speaks` whether its transport says
    by itself that it waits.
    """

    def __init__(
        self, recorder: Callable[[], FlightRecorder], speaks: Callable[[str], bool]
    ) -> None:
        self._recorder = recorder
        self._speaks = speaks
        self._ended = threading.Event()
        self._said: tuple[str, int] | None = None
        self._thread = threading.Thread(target=self._live, name="plait-pulse", daemon=True)

    def start(self) -> None:
        """Begin to beat, in a thread of this process."""
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end; it does within `BEAT_SECONDS`, and is not joined."""
        self._ended.set()

    def _live(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            recorder = self._recorder()
            recorder.beat()
            waiting = recorder.waiting_since()
            if waiting is not None and now() - waiting >= NOTICE_SECONDS:
                self._look(recorder)

    def _look(self, recorder: FlightRecorder) -> None:
        view = own_view(recorder)
        if not view.waits or view.current is None or self._speaks(view.current.axis):
            return
        mark = (view.current.axis, view.current.number)
        if mark == self._said:
            return
        self._said = mark
        known = {view.rank: view}
        if recorder.folder is not None:
            known = {**Records(recorder.folder).views(), **known}
        say(waiting_line(view, view.current, known))


def waiting_line(view: RankSnapshot, place: Communication, views: dict[int, RankSnapshot]) -> str:
    """`rank 0 has been waiting for rank 2 for 5 s (all_reduce on axis dp)`."""
    ranks = awaited(view, views) or tuple(one for one in place.ranks if one != view.rank)
    names = " or ".join(map(str, ranks))
    seconds = now() - place.issued
    what = f"{place.op} on axis {place.axis}"
    return f"rank {view.rank} has been waiting for rank {names} for {seconds:.0f} s ({what})"
