"""The only callers of communication: axes, transitions between layouts, the ledger.

`transitions` and `ledger` are pure; the rest needs torch and is loaded when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.comm.axis import Axis as Axis
    from plait.comm.functional import transition as transition
    from plait.comm.ledger import Count as Count
    from plait.comm.ledger import Ledger as Ledger
    from plait.comm.probing import probe as probe
    from plait.comm.simulated import simulate as simulate
    from plait.comm.transitions import bytes_sent as bytes_sent
    from plait.comm.transitions import transition_bytes as transition_bytes
    from plait.comm.work import Waitable as Waitable
    from plait.comm.work import Work as Work
    from plait.comm.work import wait_all as wait_all
    from plait.comm.world import World as World
    from plait.comm.world import init as init

_HOMES = {
    "Axis": "axis",
    "Count": "ledger",
    "Ledger": "ledger",
    "Waitable": "work",
    "Work": "work",
    "World": "world",
    "bytes_sent": "transitions",
    "init": "world",
    "probe": "probing",
    "simulate": "simulated",
    "transition": "functional",
    "transition_bytes": "transitions",
    "wait_all": "work",
}
__all__ = [
    "Axis",
    "Count",
    "Ledger",
    "Waitable",
    "Work",
    "World",
    "bytes_sent",
    "init",
    "probe",
    "simulate",
    "transition",
    "transition_bytes",
    "wait_all",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'plait.comm' has no attribute {name!r}")
    return getattr(import_module(f"plait.comm.{_HOMES[name]}"), name)
