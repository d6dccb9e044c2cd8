"""Every rank keeps a log, and records a step under torch's profiler where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import plait, write_config


@pytest.mark.slow
def test_ranks_keep_logs_and_profile_a_step(tmp_path: Path) -> None:
    write_config(tmp_path)
    words = ("--plan", "dp2", "--out", "run", "--profile", "2", "--set", "train.deterministic=true")
    done = plait("train", "tiny.toml", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "step 3/3" in done.err
    assert "step 3/3" in (tmp_path / "run" / "logs" / "rank-0.txt").read_text()
    assert (tmp_path / "run" / "logs" / "rank-1.txt").exists()
    for rank in (0, 1):
        trace = json.loads((tmp_path / "run" / "profile" / f"rank-{rank}.json").read_text())
        assert any("aten::" in str(event.get("name")) for event in trace["traceEvents"])


def test_a_step_that_is_none_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    done = plait("train", "tiny.toml", "--profile", "9", cwd=tmp_path)
    assert done.code == 2
    assert "--profile 9 is none of the steps 1 to 3" in done.err
