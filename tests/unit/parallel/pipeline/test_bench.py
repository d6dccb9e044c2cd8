"""The benchmark of pipelines runs, and says what the simulated step is."""

from __future__ import annotations

from benchmarks.pipeline.bench import measure, rows
from benchmarks.pipeline.systems import BASE, CASES

from plait.launcher import launch


def test_a_measured_step_stands_beside_a_simulated_one() -> None:
    names = [BASE, "torch ZBVZeroBubble", "plait 1f1b", "plait zbv"]
    ranks = launch(measure, "compute", names, 1, 2, "torch", nproc=2)
    found = {row.name: row for row in rows(CASES["compute"], 2, names, ranks)}
    assert list(found) == names
    assert found["plait zbv"].to_counterpart is not None
    for name in ("plait 1f1b", "plait zbv"):
        assert found[name].simulated_seconds
        assert 0 < (found[name].simulated_bubble or 0) < 1
        assert found[name].cells().count("|") == 9
