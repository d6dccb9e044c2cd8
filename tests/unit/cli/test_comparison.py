"""The page of `plait compare`: whole in one file, with every plan in the table, the bars and the
timelines.
"""

from __future__ import annotations

from typing import Any

from plait.run.comparison import HEAD, cells, html
from plait.trace import Span, Timeline


def row(plan: str) -> dict[str, Any]:
    return {
        "plan": plan,
        "final_loss": 2.5,
        "loss_error": 1e-7,
        "step_seconds_median": 0.012,
        "tokens_per_second": 12345.6,
        "bubble_fraction": 0.25,
        "peak_memory": [1e6, 2e6],
        "traffic": {"dp": 3e6, "pp": 1e6},
        "state_memory": [{"parameters": 1000, "optimizer": 2000}],
        "breakdown": {
            "compute_seconds": 0.01,
            "waiting_seconds": {"pp": 0.002, "tp": 0.0},
            "other_seconds": 0.001,
        },
    }


def test_a_row_is_one_cell_a_column() -> None:
    assert cells(row("pp2")) == (
        "pp2",
        "2.5000",
        "1.0e-07",
        "12.0",
        "12,346",
        "25.0%",
        "2",
        "dp 3.0, pp 1.0",
    )
    assert len(HEAD) == 8


def test_the_page_shows_every_plan_and_needs_no_network() -> None:
    timeline = Timeline(0)
    timeline.add(Span("0F0", "F", 0, 0.0, 0.01))
    text = html("Plans", [row("pp2 mb4"), row("dp2")], [timeline, Timeline(0)])
    assert text.count("<td>pp2 mb4</td>") == 1
    for expected in ("waiting for pp", "computing", "<svg", "Traffic", "Memory", "rank 0"):
        assert expected in text
    assert "waiting for tp" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "No step was traced." in html("Plans", [row("dp1")], [Timeline(0)])
