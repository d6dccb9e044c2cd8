"""The page of `plait compare`: whole in one file, with every plan in the table, the bars and the
timelines.
"""

from __future__ import annotations

from typing import Any

from plait.run.comparison import ComparedRun, cells, head, html, lead, pictures_of
from plait.trace import Span, Timeline


def row(plan: str) -> dict[str, Any]:
    return {
        "plan": plan,
        "final_loss": 2.5,
        "loss_error": 1e-7,
        "step_seconds_median": 0.012,
        "tokens_per_second": 12345.6,
        "unit": "tokens",
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
    assert len(head([row("pp2")])) == 8
    assert head([{**row("pp2"), "unit": "samples"}])[4] == "samples/s"


def test_the_page_shows_every_plan_and_needs_no_network() -> None:
    timeline = Timeline(0)
    timeline.add(Span("0F0", "F", 0, 0.0, 0.01))
    text = html("Plans", [row("pp2 mb4"), row("dp2")], [timeline, Timeline(0)])
    assert text.count(">pp2 mb4</td>") == 1
    for expected in ("waiting for pp", "computing", "<svg", "Traffic", "Memory", "rank 0"):
        assert expected in text
    assert "waiting for tp" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "No step was traced." in html("Plans", [row("dp1")], [Timeline(0)])


def test_the_page_begins_with_the_fastest_plan_and_overlays_the_courses() -> None:
    rows = [row("pp2 mb4"), {**row("dp2"), "tokens_per_second": 24691.2}]
    assert lead(rows) == (
        "Of 2 plans, dp2 trained fastest, with 24,691 tokens a second, 100% more than pp2 mb4; "
        "their losses differ by 1.0e-07 at most."
    )
    guess = {
        "tokens_per_second": 20000.0,
        "step_seconds": 0.01,
        "bubble_fraction": 0.0,
        "memory": {"parameters": 900, "gradients": 900, "optimizer": 1800, "total": 3600},
        "traffic": {"dp": 3e6, "tp": 0.0},
    }
    course = [{"step": 1, "loss": 2.5, "grad_norm": 1.0, "tokens": 10, "seconds": 0.1}]
    runs = [ComparedRun(course), ComparedRun(course, guess, ["Try 'tp2'."])]
    timelines = [Timeline(0), Timeline(0)]
    text = html("Plans", rows, timelines, runs)
    for expected in (
        '<p class="lead">Of 2 plans',
        "<span>tokens a second</span><b>24,691</b><small>predicted 20,000</small>",
        ">12.0 / 10.0</td>",
        ">Try &#x27;tp2&#x27;.</td>",
        "predicted, fullest rank",
        '<div id="charts">',
    ):
        assert expected in text
    data = pictures_of(rows, timelines, runs)
    assert [run["name"] for run in data["runs"]] == ["pp2 mb4", "dp2"]
    assert data["timelines"] == []
