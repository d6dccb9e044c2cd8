"""Fixtures for all tests: `ranks` runs a function on real Gloo ranks, from a pool of processes that
is started once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
from hypothesis import settings

from tests.helpers.pool import Pool

settings.register_profile("plait", deadline=None)  # a shared machine may be slow at any moment
settings.load_profile("plait")


def pytest_sessionstart() -> None:
    """A session that is asked to end takes down what its tests have started, as one that is
    interrupted does.
    """

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, interrupt)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(rank_pool: Pool) -> Callable[..., list[Any]]:
    """`ranks(n, fn, *args, plan="dp2")`: the results of `fn(world, *args)` on n ranks, by rank."""
    return rank_pool.run
