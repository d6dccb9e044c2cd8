"""Loops around engines whose ranks do not step together: local SGD, an asynchronous parameter
server, and federated rounds.

A driver decides when ranks exchange what; the data strategy below it only holds the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.outer.async_server.driver import AsyncServerDriver
from plait.outer.async_server.weights import KeyedWeights
from plait.outer.driver import Change, DeviceChange, Driver, StepReport, SynchronousDriver
from plait.outer.local import LocalDriver
from plait.outer.options import Asynchrony
from plait.parallel import data
from plait.parallel.data import DataGroup, DataStrategy, Unit


def make_strategy(
    name: str, units: Sequence[Unit], group: DataGroup, asynchrony: Asynchrony
) -> DataStrategy:
    """The data strategy that a plan calls `name`.

    An asynchronous server whose bound is 0, or whose worker is alone, waits for everybody: that is
    the synchronous server.
    """
    if name == "local":
        return data.unreduced(units, group)
    if name == "async-server":
        is_synchronous = asynchrony.stale == 0 or group.num_workers == 1
        return data.make("server", units, group) if is_synchronous else KeyedWeights(units, group)
    return data.make(name, units, group)


def make_driver(
    name: str,
    strategy: DataStrategy,
    make_update: Callable[[Change], None],
    asynchrony: Asynchrony,
) -> Driver:
    """The driver of a strategy made by `make_strategy`. Collective.

    Args:
        name: the plan's word for the data strategy.
        strategy: holds this rank's parameters.
        make_update: lets the optimizer make one update of this rank's shards.
        asynchrony: the bounds and rates that a plan and its config give.
    """
    if isinstance(strategy, KeyedWeights):
        return AsyncServerDriver(strategy, make_update, asynchrony)
    if name == "local" and isinstance(strategy, data.ReplicatedParameters):
        return LocalDriver(strategy, make_update, asynchrony)
    return SynchronousDriver(strategy, make_update)


__all__ = [
    "AsyncServerDriver",
    "Asynchrony",
    "Change",
    "DeviceChange",
    "Driver",
    "KeyedWeights",
    "LocalDriver",
    "StepReport",
    "SynchronousDriver",
    "make_driver",
    "make_strategy",
]
