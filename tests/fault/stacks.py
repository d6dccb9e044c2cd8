"""Stacks of all threads of processes, asked for from outside by a signal.

    python -m tests.fault.stacks ...     an agent of torchrun that answers; the words are torchrun's

An agent with `BLIND` in its variables sees no machine that comes. Agents ask their store once a
second, so one of two may see it when the ranks of the other have ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tests.fault.processes import children

SIGNAL = signal.SIGRTMIN + 9
ANSWER_SECONDS = 3.0
OWN = ("tests.fault.stacks", "tests.fault.paced")


def answer_signals() -> None:
    """Write the stacks of this process to stderr whenever it gets the signal."""
    faulthandler.register(SIGNAL, file=sys.__stderr__, all_threads=True)


def ask(agents: Iterable[int]) -> None:
    """Have agents and their ranks write their stacks, each to its own stderr."""
    for agent in agents:
        for pid in (agent, *children(agent)):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if any(own in words for own in OWN):
                    os.kill(pid, SIGNAL)
    time.sleep(ANSWER_SECONDS)


def be_blind() -> None:
    """Have the agent of this process see no machine that comes."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    DynamicRendezvousHandler.num_nodes_waiting = lambda handler: 0  # type: ignore[method-assign]


if __name__ == "__main__":
    answer_signals()
    if "BLIND" in os.environ:
        be_blind()
    from torch.distributed.run import main

    main(sys.argv[1:])
