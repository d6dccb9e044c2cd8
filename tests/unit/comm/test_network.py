"""A store that another process keeps is reached once it is there, and given up when it is lost."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from plait.comm import network
from plait.comm.network import LOOPBACK, listening_store, store_at

MINUTE = timedelta(seconds=60)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port at which nothing listens; each try to connect takes a fifth of a second."""
    monkeypatch.setattr(network, "CONNECT_TIMEOUT", timedelta(seconds=0.2))
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def test_a_store_that_comes_later_is_reached(port: int) -> None:
    tries = []

    def comes() -> bool:
        if not tries:
            tries.append(listening_store(port=port))
        return False

    store = store_at(LOOPBACK, port, MINUTE, comes)
    store.set("key", "value")
    assert tries[0].get("key") == b"value" and store.timeout == MINUTE


def test_a_store_that_is_lost_is_given_up(port: int) -> None:
    given_up = threading.Event()
    threading.Timer(0.5, given_up.set).start()
    with pytest.raises(dist.DistError):
        store_at(LOOPBACK, port, MINUTE, given_up.is_set)
    assert given_up.is_set()


def test_the_time_ends_the_tries(port: int) -> None:
    with pytest.raises(dist.DistError):
        store_at(LOOPBACK, port, timedelta(seconds=0.3), lambda: False)
