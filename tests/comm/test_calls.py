"""Calls over TCP: answered out of step, counted, refused to strangers; callers that go are noticed
and may come back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from plait.comm.calls import CallMessage, Connection, Service
from plait.errors import RankFailed


class Desk:
    """A service that doubles what it gets, and remembers who was lost."""

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.gone = threading.Event()
        self.service = Service(self.answer, self.note)

    def answer(self, caller: int, question: CallMessage) -> CallMessage:
        assert question.data is not None
        return CallMessage(
            question.kind + 1,
            (caller, *question.numbers[:2]),
            question.data.view(torch.float64) * 2,
        )

    def note(self, caller: int) -> None:
        self.lost.append(caller)
        self.gone.set()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.service.close()


def test_a_question_is_answered_into_the_callers_memory(desk: Desk) -> None:
    line = Connection(desk.service.address, 7)
    into = torch.empty(2, 3, dtype=torch.float64)
    data = torch.arange(6, dtype=torch.float64)
    for number in range(3):
        line.ask(CallMessage(4, (number, 0.5), data))
        answer = line.answer(into)
        assert (answer.kind, answer.numbers[:3]) == (5, (7, number, 0.5))
        assert torch.equal(into.view(-1), 2 * data)
    assert desk.service.take_sent_bytes() in {
        2 * 48,
        3 * 48,
    }  # the last one is counted just after it was sent
    line.close()


def test_a_caller_that_goes_is_lost_and_may_come_back(desk: Desk) -> None:
    Connection(desk.service.address, 3).close()
    assert desk.gone.wait(5) and desk.lost == [3]
    line = Connection(desk.service.address, 3)
    line.ask(CallMessage(0, (), torch.ones(1, dtype=torch.float64)))
    assert line.answer(torch.empty(1, dtype=torch.float64)).kind == 1
    line.close()


def test_a_stranger_is_not_answered(desk: Desk) -> None:
    line = Connection(replace(desk.service.address, secret=bytes(32)), 0)
    with pytest.raises(RankFailed, match="gone"):
        line.ask(CallMessage(0, (), torch.ones(1 << 20)))
        line.answer(torch.empty(1 << 20))
    line.close()


def test_a_service_that_is_gone_is_named() -> None:
    desk = Desk()
    line = Connection(desk.service.address, 0)
    line.ask(CallMessage(0, (), torch.ones(1, dtype=torch.float64)))
    line.answer(torch.empty(1, dtype=torch.float64))
    desk.service.close()
    with pytest.raises(RankFailed, match=r"127\.0\.0\.1"):
        for _ in range(3):  # the first may still be taken by the kernel
            line.ask(CallMessage(0, (), torch.ones(1, dtype=torch.float64)))
            line.answer(torch.empty(1, dtype=torch.float64))
    line.close()


def test_an_answer_of_another_length_is_refused(desk: Desk) -> None:
    line = Connection(desk.service.address, 0)
    line.ask(CallMessage(0, (), torch.ones(1, dtype=torch.float64)))
    with pytest.raises(RankFailed, match="8 bytes came"):
        line.answer(torch.empty(2, dtype=torch.float64))
    line.close()


@pytest.mark.parametrize("breaks", [True, False])
def test_who_calls_anew_is_answered_after_the_old_call_is_done_with(breaks: bool) -> None:
    heard: list[str] = []
    entered = threading.Event()
    set_free = threading.Event()

    def answer(caller: int, question: CallMessage) -> CallMessage:
        if question.kind == 0:
            entered.set()
            assert set_free.wait(20)
        heard.append(f"asked {question.kind}")
        return CallMessage(question.kind)

    def lost(caller: int) -> None:
        set_free.set()
        time.sleep(0.05)  # time for the new connection's thread to be first, if nothing keeps it
        heard.append("lost")

    service = Service(answer, lost)
    old = Connection(service.address, 1)
    old.ask(CallMessage(0))
    assert entered.wait(20)
    if breaks:
        old.close()
    new = Connection(service.address, 1)
    new.ask(CallMessage(1))
    assert new.answer().kind == 1
    assert heard.index("asked 0") < heard.index("asked 1") and heard.index("lost") < heard.index(
        "asked 1"
    )
    assert heard.count("lost") == 1
    old.close()
    new.close()
    service.close()


def test_an_ended_call_is_lost_before_its_caller_is_in_again() -> None:
    heard: list[str] = []

    def answer(caller: int, question: CallMessage) -> CallMessage:
        heard.append("asked")
        return CallMessage(0)

    def lost(caller: int) -> None:
        time.sleep(0.05)
        heard.append("lost")

    service = Service(answer, lost)
    for _ in range(3):
        line = Connection(service.address, 1)
        line.ask(CallMessage(0))
        line.answer()
        line.close()
    service.close()
    assert heard[:5] == ["asked", "lost", "asked", "lost", "asked"]
