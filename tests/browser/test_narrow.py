"""A screen of 400 pixels: no page scrolls sideways, whatever is opened, selected or told on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.cli import main
from plait.explore.server import PageServer
from tests.browser.chromium import expect, opened

WIDTH = "document.documentElement.scrollWidth"
OPENED = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
WIDEST = """() => [...document.querySelectorAll("body *")]
  .filter((one) => one.getBoundingClientRect().right > 401)
  .map((one) => `${one.tagName}#${one.id} ${Math.round(one.getBoundingClientRect().right)}`)
  .slice(0, 5)"""
CUT_TABLES = """() => [...document.querySelectorAll(".table")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText)"""
LONG = "a-model-of-a-name-without-any-gap-at-which-a-line-could-be-broken-" * 2


def check_width(page: Any) -> None:
    assert page.evaluate("innerWidth") == 400
    assert page.evaluate(WIDTH) <= 400, page.evaluate(WIDEST)


def tell_the_last(page: Any, selector: str) -> None:
    """Point at the right end of each chart, where a tip has the least room."""
    for chart in page.locator(selector).all():
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        for x in (0.5, 0.97):
            page.mouse.move(box["x"] + x * box["width"], box["y"] + 12)
            check_width(page)


def test_the_page_of_plans_fits(browser: Any, server: PageServer) -> None:
    with opened(browser, server.url, "narrow") as (page, said):
        page.wait_for_selector("#timeline canvas")
        check_width(page)
        page.evaluate(OPENED)
        expect(page.locator("#where")).to_contain_text("step 1 of ")
        expect(page.locator("#scaling-note")).to_contain_text("The best plan")
        page.click("#more")
        check_width(page)
        page.select_option("#export", "megatron-lm")
        expect(page.locator("#exported pre")).not_to_be_empty()
        tell_the_last(page, "#scatter canvas, #timeline canvas, #grid-scroll")
        page.focus("#scatter")
        for _ in range(40):
            page.keyboard.press("ArrowRight")
            check_width(page)
    assert not said


def test_a_long_name_and_a_long_error_fit(browser: Any, server: PageServer) -> None:
    with opened(browser, server.url, "narrow") as (page, _):
        page.wait_for_selector("#plans tbody tr")
        for cluster in (LONG, "h100x7"):
            page.fill("#cluster", cluster)
            page.wait_for_selector("#results:not(.waiting)")
            assert cluster in page.inner_text("#headline") + page.inner_text("#error")
            check_width(page)
        page.fill("#cluster", "h100x8")
        page.evaluate(OPENED)
        page.fill("#paste", json.dumps({"model_type": LONG}))
        expect(page.locator("#error")).to_contain_text("a-model-of")
        check_width(page)


@pytest.mark.parametrize("name", ["report", "compare", "schedule"])
def test_a_written_page_fits(name: str, browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages[name].as_uri(), "narrow") as (page, said):
        check_width(page)
        page.evaluate(OPENED)
        check_width(page)
        assert page.evaluate(CUT_TABLES) == []
        tell_the_last(page, "#timelines canvas, #charts canvas")
    assert not said


def test_the_schedule_of_a_strategy_fits(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "explain.html"
    assert main(["explain", "pp4:1f1b mb8", "--html", str(path)]) == 0
    with opened(browser, path.as_uri(), "narrow") as (page, said):
        check_width(page)
        tell_the_last(page, "#timelines canvas")
        assert page.inner_text("#where").startswith("step 1 of ")
        page.focus("#timelines canvas")
        page.keyboard.press("+")
        page.keyboard.press("ArrowRight")  # moves the timeline, not the step
        assert page.inner_text("#where").startswith("step 1 of ")
        page.click("#forward")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#where").startswith("step 3 of ")
    assert not said


def test_every_step_of_a_strategy_fits(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "explain.html"
    assert main(["explain", "tp8:3d", "--html", str(path)]) == 0
    with opened(browser, path.as_uri(), "narrow") as (page, said):
        for _ in range(int(page.inner_text("#where").split(" of ")[1].split()[0].rstrip(":,."))):
            check_width(page)
            page.keyboard.press("ArrowRight")
    assert not said
