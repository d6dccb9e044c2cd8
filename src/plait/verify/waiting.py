"""The answer that the first rank works out while the others wait, however long it takes.

A rank that is silent for minutes counts as failed. So a thread of the first rank tells the others
every few seconds that it goes on. A rank that hangs in the parallel run is named as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from plait.comm import World
from plait.errors import PlaitError

T = TypeVar("T")
TELL_SECONDS = 15.0
GOES_ON = "goes on"


def of_first(world: World, work: Callable[[], T]) -> T:
    """The first rank's result of `work()`, on every rank. Collective.

    `work` must not raise: the others would wait in vain.
    """
    axis = world.axis("world")
    while world.rank:
        word, answer = axis.gather_objects(None)[0]
        if word != GOES_ON:
            told: T = answer
            return told
    lost: list[PlaitError] = []
    is_done = threading.Event()

    def tell() -> None:
        while not is_done.wait(TELL_SECONDS):
            try:
                axis.gather_objects((GOES_ON, None))
            except PlaitError as error:  # another rank is lost
                lost.append(error)
                return

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        result = work()
    finally:
        is_done.set()
        teller.join()
    if lost:
        raise lost[0]
    axis.gather_objects(("done", result))
    return result
