"""Healthy runs beside a busy machine: no alarm. A sample here, the rest on demand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.quiet import load, watched

STEPS = 150


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp2:zero1", "pp2:1f1b mb4"])
def test_a_healthy_run_beside_others_raises_no_alarm(plan: str, tmp_path: Path) -> None:
    with load(4):
        run = watched(plan, STEPS, tmp_path)
    assert run.code == 0, run.err
    assert run.steps == STEPS
    assert run.findings == []
