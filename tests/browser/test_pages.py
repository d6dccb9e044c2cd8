"""The pages of runs, comparisons and schedules in a headless Chromium: what their scripts draw, at
every width, without a word on the console. Pictures go where `PLAIT_PICTURES` names a folder.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from plait.cli import main
from plait.explore.html import drawing
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.schedules import make
from plait.run.comparison import ComparedRun, html, pictures_of
from plait.trace.page import Drawing
from tests.browser.chromium import SCREENS, opened
from tests.unit.cli.test_comparison import row
from tests.unit.cli.test_report import drawn, two_steps, write_run


def course(speed: float) -> list[dict[str, Any]]:
    """A made-up run of forty steps."""
    return [
        {
            "step": step,
            "loss": 2.0 + 3.5 * math.exp(-step / 12),
            "grad_norm": 1.0 + 2.0 * math.exp(-step / 6),
            "lr": 3e-4 * min(1.0, step / 10),
            "memory": 4e8 + 1e6 * step,
            "tokens": 64,
            "seconds": speed * (1 + 0.1 * math.sin(step)),
        }
        for step in range(1, 41)
    ]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    schedule = lower(make("1f1b", 2, 4))
    run = write_run(folder, "pp2:1f1b mb4", two_steps(schedule, 2))
    lines = "".join(f"{json.dumps(step)}\n" for step in course(0.02))
    (run / "metrics.jsonl").write_text(lines)
    summary = json.loads((run / "summary.json").read_text())
    state = [{"parameters": 40_000, "gradients": 40_000, "optimizer": 80_000}] * 2
    more = {"steps": 40, "final_loss": 2.125, "tokens_per_second": 3200.0, "state_memory": state}
    (run / "summary.json").write_text(json.dumps({**summary, **more, "traffic": {"pp": 4096}}))
    assert main(["report", str(run), "--out", str(folder / "report.html")]) == 0
    words = ["schedule", "zbv", "--stages", "4", "--microbatches", "8"]
    assert main([*words, "--html", str(folder / "schedule.html")]) == 0
    rows = [row("pp2 mb4"), {**row("dp2:zero1"), "tokens_per_second": 15123.4}]
    timelines = [drawn(schedule, 2), drawn(lower(make("1f1b", 1, 1)), 1)]
    runs = [ComparedRun(course(0.02)), ComparedRun(course(0.016))]
    script = Drawing(*drawing(pictures_of(rows, timelines, runs)))
    text = html("Plans compared: made-up runs", rows, timelines, runs, script)
    (folder / "compare.html").write_text(text)
    return {name: folder / f"{name}.html" for name in ("report", "compare", "schedule")}


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize(
    ("name", "canvases"), [("report", 3 + 6), ("compare", 2 + 6), ("schedule", 1)]
)
def test_a_page_draws_itself(
    name: str, canvases: int, screen: str, browser: Any, pages: dict[str, Path]
) -> None:
    with opened(browser, pages[name].as_uri(), screen) as (page, said):
        assert page.locator("canvas").count() == canvases
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        first = page.locator("#timelines canvas").first
        first.scroll_into_view_if_needed()
        before = first.evaluate("(one) => one.toDataURL()")
        box = first.bounding_box()
        page.mouse.move(box["x"] + 62, box["y"] + 10)
        assert "0F0" in page.locator("#timelines .tip").first.inner_text()
        if name == "report":
            curves = page.inner_text("#charts")
            assert curves.count("predicted") == 3 + 1  # a line in three, and a word of one title
        folder = os.environ.get("PLAIT_PICTURES")
        if folder:
            page.mouse.move(0, 0)
            page.screenshot(path=Path(folder) / f"{name}-{screen}.png", full_page=True)
        first.drag_to(
            first, source_position={"x": 100, "y": 10}, target_position={"x": 200, "y": 10}
        )
        assert first.evaluate("(one) => one.toDataURL()") != before
        first.dblclick()
        assert first.evaluate("(one) => one.toDataURL()") == before
    assert not said


def test_a_strategy_is_stepped_through(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "explain.html"
    assert main(["explain", "tp4:2d", "--html", str(path)]) == 0
    for screen in SCREENS:
        with opened(browser, path.as_uri(), screen) as (page, said):
            assert page.inner_text("#where").startswith("step 1 of ")
            first = page.inner_text("#panels")
            page.click("#forward")
            page.keyboard.press("ArrowRight")
            assert page.inner_text("#where").startswith("step 3 of ")
            assert page.inner_text("#panels") != first
            assert page.locator("#panels .panel").count() == 4
            assert "rank 0, from rank 1" in page.inner_text("#panels")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            folder = os.environ.get("PLAIT_PICTURES")
            if folder and screen == "light":
                page.screenshot(path=Path(folder) / "explain-light.png", full_page=True)
            page.click("#back")
            page.click("#play-steps")
            assert page.inner_text("#play-steps") == "Stop"
            page.click("#play-steps")
            assert page.inner_text("#where").startswith("step 2 of ")
        assert not said
