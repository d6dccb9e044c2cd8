"""Memory that outlives the ranks of an agent, and ends with the agent."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from plait.errors import RunError
from plait.launcher import host_memory
from plait.launcher.host_memory import Agent, HostMemory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
LIMIT_SECONDS = 60.0


@pytest.fixture
def agent() -> Iterator[Agent]:
    process = subprocess.Popen(["sleep", "600"])
    started = host_memory._started(process.pid)
    assert started is not None
    found = Agent(process.pid, started)
    holder = host_memory.begin(found)
    yield found
    process.kill()
    process.wait()
    assert holder.wait(LIMIT_SECONDS) == 0
    assert not found.folder.exists()


def reached(agent: Agent) -> HostMemory:
    memory = HostMemory(agent)
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        try:
            memory.ask()
        except RunError:
            time.sleep(0.05)
            continue
        return memory
    raise AssertionError("nobody answers")


@pytest.mark.slow
def test_files_are_held_by_name_until_they_are_dropped(agent: Agent) -> None:
    memory = reached(agent)
    (path,) = memory.ask(make=["a"]).values()
    path.write_bytes(b"state")
    assert memory.ask(make=["a", "b"]).keys() == {"a", "b"}
    assert memory.ask()["a"] == path
    assert path.read_bytes() == b"state"
    assert memory.ask(drop=["a", "c"]).keys() == {"b"}
    assert not path.exists()


@pytest.mark.slow
def test_an_agent_of_the_same_number_finds_nothing_of_an_earlier_one(agent: Agent) -> None:
    reached(agent).ask(make=["a"])
    later = replace(agent, started=agent.started + 1)
    assert agent.is_alive
    assert not later.is_alive
    assert HostMemory(later).host != HostMemory(agent).host
    with pytest.raises(RunError, match="snapshots is gone"):
        HostMemory(later).ask()
