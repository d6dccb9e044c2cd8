"""One browser, one server of the page of plans, and written pages of made-up runs for all tests."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.cli import main
from plait.cli.explore import opening_of, site_of
from plait.explore.html import drawing
from plait.explore.server import PageServer
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.schedules import make
from plait.run.comparison import ComparedRun, html, pictures_of
from plait.trace.page import Drawing
from tests.browser.chromium import chromium
from tests.unit.cli.test_comparison import row
from tests.unit.cli.test_report import drawn, two_steps, write_run


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="session")
def server() -> Iterator[PageServer]:
    one = PageServer(site_of(opening_of("llama3-8b", "h100x512")))
    thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield one
    one.shutdown()
    thread.join()
    one.server_close()


def course(speed: float, tokens: int = 64) -> list[dict[str, Any]]:
    """A made-up run of forty steps."""
    return [
        {
            "step": step,
            "loss": 2.0 + 3.5 * math.exp(-step / 12),
            "grad_norm": 1.0 + 2.0 * math.exp(-step / 6),
            "lr": 3e-4 * min(1.0, step / 10),
            "memory": 3.2e5 + 1e3 * min(step, 12),
            "tokens": tokens,
            "seconds": speed * (1 + 0.1 * math.sin(step)),
        }
        for step in range(1, 41)
    ]


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    schedule = lower(make("1f1b", 2, 4))
    run = write_run(folder, "pp2:1f1b mb4", two_steps(schedule, 2))
    lines = "".join(f"{json.dumps(step)}\n" for step in course(0.02))
    (run / "metrics.jsonl").write_text(lines)
    summary = json.loads((run / "summary.json").read_text())
    state = [{"parameters": 40_000, "gradients": 40_000, "optimizer": 80_000}] * 2
    memory = {"peak_memory": [420_000, 380_000], "memory_before": [20_000, 20_000]}
    more = {
        **memory,
        "steps": 40,
        "final_loss": 2.125,
        "tokens_per_second": 3200.0,
        "state_memory": state,
    }
    (run / "summary.json").write_text(json.dumps({**summary, **more, "traffic": {"pp": 4096}}))
    assert main(["report", str(run), "--out", str(folder / "report.html")]) == 0
    words = ["schedule", "zbv", "--stages", "4", "--microbatches", "8"]
    assert main([*words, "--html", str(folder / "schedule.html")]) == 0
    faster = {"tokens_per_second": 15123.4, "step_seconds_median": 0.0099, "bubble_fraction": 0.0}
    rows = [row("pp2 mb4"), {**row("dp2:zero1"), **faster}]
    timelines = [drawn(schedule, 2), drawn(lower(make("1f1b", 1, 1)), 1)]
    runs = [ComparedRun(course(0.012, 148)), ComparedRun(course(0.0098, 148))]
    script = Drawing(*drawing(pictures_of(rows, timelines, runs)))
    text = html("Plans compared: made-up runs", rows, timelines, runs, script)
    (folder / "compare.html").write_text(text)
    return {name: folder / f"{name}.html" for name in ("report", "compare", "schedule")}
