"""Errors that stand in no public report: each script shows its own without plait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NEW = Path(__file__).parents[2] / "atlas" / "new"
LEAVING = Path(__file__).parents[1] / "helpers" / "leave_at_once.py"
PAGE = Path(__file__).parents[2] / "docs" / "verify.md"


def said(script: str) -> str:
    """What a script prints on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*command, "--nproc_per_node", "2", str(LEAVING), str(NEW / script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_every_script_has_its_row_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"| `atlas/new/{one.name}` |" in page for one in NEW.glob("*.py"))


@pytest.mark.slow
def test_gradients_of_mean_losses_on_split_tensors_are_too_large_by_the_ranks() -> None:
    lines = said("torch_dtensor_mean_losses.py").splitlines()
    assert len(lines) == 12
    for line in lines:
        assert line.endswith(
            "gradient 1.0000 times" if line.split(",")[0] == "l1_loss" else "gradient 2.0000 times"
        ), line


@pytest.mark.slow
def test_the_first_step_of_a_pipeline_counts_what_is_no_sample() -> None:
    assert "5 batches were counted of 4" in said("torch_pipelining_buffers.py")


@pytest.mark.slow
def test_gradients_of_products_that_are_written_into_are_wrong_where_torch_selects() -> None:
    lines = said("torch_selective_in_place.py").splitlines()
    assert lines.count("Added: gradient off by 1.18 of its norm") == 2
    assert lines.count("Recurrent: gradient off by 0.18 of its norm") == 2
