"""Ranks that others have started meet, and what keeps them from it is said in a sentence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

import plait
from plait.comm import init
from plait.comm.network import LOOPBACK, listening_store
from plait.comm.rollcall import RollCall
from plait.errors import RankFailed, WorldSizeError
from plait.mesh import Mesh

SECOND = timedelta(seconds=1)
MINUTE = timedelta(seconds=60)
Call = tuple[int, int]
JOIN = """
import sys
from plait.comm import init
from plait.errors import PlaitError
from plait.mesh import Mesh
try:
    init(Mesh(dp=int(sys.argv[1])), timeout_seconds=20, device="cpu").close()
except PlaitError as error:
    print(error)
"""


def called(calls: list[Call], timeout: timedelta) -> list[Future[None]]:
    """The answers of ranks (rank, size), each with its own connection to one store."""
    kept = listening_store()

    def answer(call: Call) -> None:
        store = TCPStore(LOOPBACK, kept.port, is_master=False)
        RollCall(store, *call).answer(timeout, every_seconds=0.3)

    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(answer, call) for call in calls]


def test_ranks_that_all_come_meet_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    answers = called([(rank, 4) for rank in range(4)], MINUTE)
    assert [one.result() for one in answers] == [None] * 4
    assert time.monotonic() - began < 10
    assert "waiting" not in capfd.readouterr().err


def test_the_first_rank_that_is_here_names_the_absent_ones(
    capfd: pytest.CaptureFixture[str],
) -> None:
    answers = called([(1, 4), (2, 4)], SECOND)
    for answer in answers:
        with pytest.raises(RankFailed, match="for ranks 0, 3 to come: 2 of 4 ranks are here; the"):
            answer.result()
    said = capfd.readouterr().err
    assert "plait: rank 1 has been waiting for 0 s for ranks 0, 3 to come" in said
    assert "plait: rank 2" not in said


def test_a_rank_that_two_processes_take_is_named() -> None:
    answers = called([(0, 3), (1, 3), (1, 3)], SECOND)
    with pytest.raises(RankFailed, match=r"for rank 2 to come.*rank 1 more than once \(RANK must"):
        answers[0].result()


def test_many_absent_ranks_are_counted() -> None:
    answers = called([(0, 300)], SECOND)
    with pytest.raises(RankFailed, match="for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 291 more to come"):
        answers[0].result()


def test_ranks_that_were_told_different_worlds_all_end() -> None:
    for answer in called([(0, 2), (1, 4)], MINUTE):
        with pytest.raises(WorldSizeError, match=r"WORLD_SIZE must be alike on all ranks"):
            answer.result()


@pytest.mark.parametrize("is_one_machine", [True, False])
def test_processes_that_were_told_different_worlds_end_with_a_sentence(
    is_one_machine: bool,
) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    told = {**os.environ, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    for name in ("LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        told.pop(name, None)
    ranks = []
    for rank, size in ((0, "2"), (1, "4")):
        own = {**told, "RANK": str(rank), "WORLD_SIZE": size}
        if is_one_machine:
            own["LOCAL_WORLD_SIZE"] = size
        command = [sys.executable, "-c", JOIN, size]
        ranks.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert any("WORLD_SIZE must be alike" in line for line in said), said


def worlds_one_after_the_other(number: int) -> int:
    """The worlds that this rank has joined; the first rank comes to each a moment late."""
    for _ in range(number):
        if os.environ["RANK"] == "0":
            time.sleep(0.5)
        init(Mesh(dp=2), timeout_seconds=20, device="cpu").close()
    return number


def test_ranks_of_one_launch_meet_again_and_again() -> None:
    """The agent's store still has the addresses of an earlier world, which nobody answers."""
    assert plait.launch(worlds_one_after_the_other, 3, nproc=2) == [3, 3]
