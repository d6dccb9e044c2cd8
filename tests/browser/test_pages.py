"""The pages of runs, comparisons and schedules in a headless Chromium: what their scripts draw, at
every width, without a word on the console. Pictures go where `PLAIT_PICTURES` names a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.cli import main
from tests.browser.chromium import SCREENS, draw, opened, stop_the_clock


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
            assert curves.count("predicted") == 3
            assert "40" in curves  # without a pointer the legends tell the last step
        if (name, screen) == ("schedule", "light"):
            page.mouse.move(0, 0)
            draw(page, "schedule-light", full_page=True)
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
            if screen == "light":
                draw(page, "explain-light", full_page=True)
            page.click("#back")
            stop_the_clock(page)
            page.click("#play-steps")
            assert page.inner_text("#play-steps") == "Stop"
            page.clock.run_for(1700)
            page.click("#play-steps")
            page.clock.run_for(10_000)
            assert page.inner_text("#where").startswith("step 3 of ")
        assert not said
