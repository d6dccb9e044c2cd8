"""What the watcher makes of a rank that does not move."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.doctor.findings import RunFinding, report
from plait.doctor.flight import FlightRecorder
from plait.doctor.process import Usage, usage
from plait.doctor.record import Records, now
from plait.doctor.watcher import HangLimits, Watcher, is_starved

BEFORE = Usage(cpu_seconds=100.0, io_bytes=0, major_faults=0, delay_seconds=50.0)
LIMIT = 5.0


@pytest.mark.parametrize(
    ("computed", "delayed", "seconds", "expected"),
    [
        (2.0, 8.0, 10.0, True),
        (9.0, 1.0, 10.0, False),
        (0.0, 0.0, 10.0, False),  # it was not ready either
        (6.0, 24.0, 30.0, False),  # an endless loop on a busy machine
    ],
)
def test_a_rank_without_a_processor_is_no_hang_until_it_has_computed_for_the_limit(
    computed: float, delayed: float, seconds: float, expected: bool
) -> None:
    after = Usage(BEFORE.cpu_seconds + computed, 0, 0, BEFORE.delay_seconds + delayed)
    assert is_starved(BEFORE, after, seconds, LIMIT) is expected


def test_a_hang_that_the_run_has_survived_is_no_cause_of_a_later_end(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path, HangLimits(LIMIT))
    hang = RunFinding("hang", 1, 4, "its actions", "stopped process")
    watcher.hang = hang
    watcher._hung_at = 50.0
    for ended, kept in ((49.0, hang), (51.0, None)):
        step = SimpleNamespace(ended=ended, step=4, seconds=0.1)
        view: Any = SimpleNamespace(steps=(step,), moved=now())
        watcher._look({0: view})
        assert watcher.hang is kept


def test_ranks_between_two_worlds_are_not_judged(tmp_path: Path) -> None:
    flight = FlightRecorder(0, 2, tmp_path)
    entry = flight.issue("dp", "all_reduce", (0, 1), 64)
    flight.wait(entry)
    watcher = Watcher(tmp_path, HangLimits(LIMIT))
    assert watcher._running()[0].waits
    flight.meet()
    assert watcher._running() == {}
    (view,) = Records(tmp_path).views().values()
    assert not view.waits
    assert view.doing() == "meeting the other ranks anew"


def test_a_finding_is_said_where_no_file_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "findings.jsonl").mkdir()
    report(tmp_path, RunFinding("hang", 1, 4, "its actions", "stopped process"))
    told = capsys.readouterr().err
    assert "findings.jsonl takes no finding" in told and "hang: rank 1 in step 4" in told


def test_a_process_that_has_gone_has_used_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert usage(gone.pid) == Usage(0.0, 0, 0, 0.0)
    assert usage(os.getpid()).cpu_seconds > 0
