"""Faults that a rank commits are named: rank, kind, cause. A sample here, the rest on demand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import plait
from tests.fault.planted import RHYTHM, Planted, commit, generate

SAMPLE = (
    Planted("corruption", "flipped bit", 1, 5, "dp2"),
    Planted("corruption", "wrong update", 1, 6, "dp2"),
    Planted("hang", "held GIL", 1, 5, "dp2"),
    Planted("hang", "skipped collective", 1, 5, "dp2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", SAMPLE, ids=lambda fault: fault.kind)
def test_a_planted_fault_is_named(fault: Planted, tmp_path: Path) -> None:
    outcome = commit(fault, tmp_path)
    assert outcome.ok, (outcome.finding, outcome.err)
    status = plait("status", "run", "--json", cwd=tmp_path).json()
    assert status["state"] == "ended"
    late = RHYTHM if fault.kind == "wrong update" else 0  # the next comparison finds it
    assert fault.step - 1 <= status["step"] <= fault.step + late
    assert len(status["ranks"]) == 2
    assert f"{fault.finding}: rank {fault.rank} in step " in outcome.err


@pytest.mark.long
@pytest.mark.parametrize("fault", generate(0, {"hang": 10}), ids=lambda fault: fault.kind)
def test_every_planted_hang_is_named(fault: Planted, tmp_path: Path) -> None:
    outcome = commit(fault, tmp_path)
    assert outcome.ok, (outcome.finding, outcome.err)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    generate(0, {"straggler": 10, "nan": 10, "corruption": 10}),
    ids=lambda fault: fault.kind,
)
def test_every_planted_fault_is_named(fault: Planted, tmp_path: Path) -> None:
    outcome = commit(fault, tmp_path)
    assert outcome.ok, (outcome.finding, outcome.err)
