"""The engine of steps: the order in which signals are taken, whatever the order in which they
come.
"""

from __future__ import annotations

from collections import Counter

from plait.comm.shm.fabric import Signal
from plait.comm.shm.progress import ProgressEngine, ProtocolStep

ARRIVE = Signal.ARRIVE
MIDDLE = Signal.MIDDLE
EXIT = Signal.EXIT


class FakeFabric:
    """Signals that the test posts; a take of what was not posted is an error instead of a wait."""

    rank = 0
    size = 3

    def __init__(self):
        self.there: Counter[tuple[Signal, int]] = Counter()
        self.posted: list[tuple[Signal, int]] = []

    def post(self, signal, *to):
        self.posted += [(signal, peer) for peer in to]

    def try_take(self, signal, source):
        if not self.there[signal, source]:
            return False
        self.there[signal, source] -= 1
        return True

    def take(self, signal, source):
        assert self.try_take(signal, source), f"would wait for {signal.name} of {source}"

    def come(self, signal, *sources):
        self.there.update((signal, source) for source in sources)


def _engine():
    fabric = FakeFabric()
    return fabric, ProgressEngine(fabric)


def _two_phases(log, name, sources=(1, 2)):
    return [
        ProtocolStep(ARRIVE, sources, lambda: log.append(f"{name}1"), MIDDLE, sources),
        ProtocolStep(MIDDLE, sources, lambda: log.append(f"{name}2"), EXIT, sources),
        ProtocolStep(EXIT, sources, lambda: log.append(f"{name}3")),
    ]


def test_a_step_waits_for_all_its_signals_then_acts_then_answers():
    (fabric, engine), log = _engine(), []
    operation = engine.issue(_two_phases(log, "a"))
    fabric.come(ARRIVE, 1)
    engine.sweep()
    assert log == []
    fabric.come(ARRIVE, 2)
    engine.sweep()
    assert log == ["a1"]
    assert fabric.posted == [(MIDDLE, 1), (MIDDLE, 2)]
    fabric.come(MIDDLE, 1, 2)
    fabric.come(EXIT, 1, 2)
    operation.wait()
    assert log == ["a1", "a2", "a3"]
    assert operation.done


def test_an_early_operation_is_ready_before_its_last_step_and_takes_it_later():
    (fabric, engine), log = _engine(), []
    operation = engine.issue(_two_phases(log, "a"), early=True)
    fabric.come(ARRIVE, 1, 2)
    fabric.come(MIDDLE, 1, 2)
    operation.wait()
    assert (operation.ready, operation.done) == (True, False)
    fabric.come(EXIT, 1, 2)
    engine.drain()
    assert log == ["a1", "a2", "a3"]


def test_a_later_operation_takes_no_signal_that_an_earlier_one_still_needs():
    (fabric, engine), log = _engine(), []
    engine.issue(_two_phases(log, "a"))
    engine.issue([ProtocolStep(EXIT, (1,), lambda: log.append("give"))])
    last = engine.issue(_two_phases(log, "b"))
    fabric.come(ARRIVE, 1, 2)
    fabric.come(ARRIVE, 1, 2)
    engine.sweep()
    assert log == ["a1", "b1"]
    fabric.come(
        MIDDLE, 1, 2
    )  # for a, although b waits for MIDDLE too and `give` stands between them
    engine.sweep()
    assert log == ["a1", "b1", "a2"]
    fabric.come(EXIT, 1, 2)  # for a, although `give` waits for EXIT too
    engine.sweep()
    assert log == ["a1", "b1", "a2", "a3"]
    fabric.come(MIDDLE, 1, 2)
    fabric.come(EXIT, 1)
    fabric.come(EXIT, 1, 2)
    last.wait()
    assert log == ["a1", "b1", "a2", "a3", "give", "b2", "b3"]


def test_waiting_for_a_later_operation_completes_the_earlier():
    (fabric, engine), log = _engine(), []
    first = engine.issue(_two_phases(log, "a"))
    second = engine.issue(_two_phases(log, "b"))
    for signal in (ARRIVE, MIDDLE, EXIT):
        fabric.come(signal, 1, 2)
        fabric.come(signal, 1, 2)
    second.wait()
    assert first.done
    assert [entry for entry in log if entry[0] == "a"] == ["a1", "a2", "a3"]


def test_signals_of_different_peers_may_come_in_any_order():
    (fabric, engine), log = _engine(), []
    engine.issue([ProtocolStep(ARRIVE, (1,), lambda: log.append("from 1"))])
    operation = engine.issue([ProtocolStep(ARRIVE, (2,), lambda: log.append("from 2"))])
    fabric.come(ARRIVE, 2)
    engine.sweep()
    assert log == []  # in order of issue
    fabric.come(ARRIVE, 1)
    operation.wait()
    assert log == ["from 1", "from 2"]
