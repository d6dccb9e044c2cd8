"""The pages by keyboard alone: whatever a pointer reaches, keys reach, and the focus is seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from plait.cli import main
from plait.explore.server import PageServer
from tests.browser.chromium import expect, opened, stop_the_clock

FOCUS = """() => {
  const one = document.activeElement;
  const style = getComputedStyle(one);
  const place = one.closest("[id]");
  return {
    id: one.id || (place ? place.id : ""), tag: one.tagName,
    seen: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0,
    named: Boolean(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby") ||
      one.labels?.length || one.textContent.trim()),
  };
}"""
ON_THE_PAGE_OF_PLANS = (
    *("model", "sequence", "batch", "cluster", "devices", "price", "slider", "framework"),
    *("objective", "risk", "tokens", "copy-plan", "copy-command", "copy-link", "export", "plans"),
    *("more", "scatter", "timeline", "schedule", "stages", "microbatches", "play", "reset-grid"),
    *("grid", "explain-box", "scaling-box"),
)


def walked(page: Any, presses: int) -> list[dict[str, Any]]:
    """What has the focus after each press of Tab, until the page is left."""
    found = []
    for _ in range(presses):
        page.keyboard.press("Tab")
        one = page.evaluate(FOCUS)
        if one["tag"] == "BODY":
            break
        found.append(one)
    return found


def pressed(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def expect_ranks(page: Any, ranks: int) -> None:
    """The grid of this many ranks is drawn: its sliders are ahead of it while it is asked for."""
    expect(page.locator("#grid")).to_have_attribute("aria-label", re.compile(f": {ranks} ranks, "))


def test_tab_goes_through_the_page_of_plans(browser: Any, server: PageServer) -> None:
    with opened(browser, server.url, "light") as (page, said):
        page.wait_for_selector("#timeline canvas")
        found = walked(page, 90)
        order = list(dict.fromkeys(one["id"] for one in found))
        places = [order.index(name) for name in ON_THE_PAGE_OF_PLANS]
        assert places == sorted(places)
        assert not [one for one in found if not one["named"] or not one["seen"]]
    assert not said


def test_keys_choose_a_plan_and_the_devices(browser: Any, server: PageServer) -> None:
    with opened(browser, server.url, "light") as (page, said):
        page.wait_for_selector("#scatter canvas")
        first = page.inner_text("#chosen")
        page.focus("#scatter")
        pressed(page, "ArrowRight", "ArrowRight", "ArrowDown")
        told = page.inner_text("#scatter .tip").splitlines()
        assert told[0] != first and "a step" in told[1]
        assert page.locator("#scatter [role=status]").text_content().startswith(told[0])
        pressed(page, "Enter")
        assert page.inner_text("#chosen") == told[0]
        assert page.evaluate("document.activeElement.id") == "scatter"
        page.focus("#slider")
        pressed(page, "ArrowRight")
        expect(page.locator("#headline")).to_contain_text("1024 devices")
        assert page.get_attribute("#slider", "aria-valuetext") == "1024 devices"
    assert not said


def test_keys_walk_the_timeline_and_the_grid(browser: Any, server: PageServer) -> None:
    with opened(browser, server.url, "narrow") as (page, said):
        page.wait_for_selector("#timeline canvas")
        page.focus("#timeline canvas")
        pressed(page, "Enter")
        first = page.inner_text("#timeline .tip")
        assert first.startswith("rank 0: forward 0F0")
        pressed(page, "Enter", "ArrowDown")
        assert page.inner_text("#timeline .tip").startswith("rank 1: ")
        pressed(page, "ArrowUp", "Shift+Enter", "Shift+Enter", "Shift+Enter")
        assert page.inner_text("#timeline .tip") == first
        page.focus("#stages")
        pressed(page, "ArrowRight", "ArrowRight")
        expect_ranks(page, 4)
        assert page.locator("#grid-choices output").first.inner_text() == "4"
        page.focus("#grid")
        pressed(page, "ArrowRight")
        assert page.inner_text("#grid-scroll .tip").startswith("rank 0, stage 0: forward of")
        pressed(page, "ArrowDown")
        assert page.inner_text("#grid-scroll .tip").startswith("rank 1, ")
        page.focus("#play")
        stop_the_clock(page)
        pressed(page, "Enter")
        page.clock.run_for(100)
        assert page.inner_text("#play") == "Stop"
        pressed(page, "Enter")
        page.clock.run_for(100)
        assert page.inner_text("#play") == "Play"
        assert page.evaluate("document.activeElement.id") == "play"
    assert not said


def test_a_new_grid_tells_nothing_of_the_one_before(browser: Any, server: PageServer) -> None:
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    with opened(browser, server.url, "light") as (page, said):
        page.wait_for_selector("#grid[aria-label]")
        told = page.locator("#grid-scroll .tip")
        page.route("**/schedule.json", hold)
        page.focus("#stages")
        pressed(page, "ArrowRight")
        ranks = int(page.locator("#grid-choices output").first.inner_text())
        page.focus("#grid")
        pressed(page, "ArrowRight", "ArrowRight")
        assert told.inner_text().startswith("rank 0, ")
        while not held:
            page.wait_for_timeout(10)
        held.pop().continue_()
        expect_ranks(page, ranks)
        assert told.is_hidden()
        pressed(page, "ArrowRight", "ArrowDown")
        assert told.inner_text().startswith("rank 1, ")
    assert not said


def test_keys_step_through_a_strategy(browser: Any, server: PageServer) -> None:
    with opened(browser, server.url, "light") as (page, said):
        page.wait_for_selector("#timeline canvas")
        page.focus("#explain-box summary")
        pressed(page, "Enter")
        expect(page.locator("#where")).to_contain_text("step 1 of ")
        page.focus("#forward")
        pressed(page, "Enter", "ArrowRight", "ArrowRight", "ArrowLeft")
        assert page.inner_text("#where").startswith("step 3 of ")
        page.focus("#step")
        pressed(page, "ArrowRight")
        assert page.inner_text("#where").startswith("step 4 of ")
    assert not said


def test_written_pages_are_walked_by_keys(
    browser: Any, pages: dict[str, Path], tmp_path: Path
) -> None:
    assert main(["explain", "dp2:zero3", "--html", str(tmp_path / "explain.html")]) == 0
    for path in (*pages.values(), tmp_path / "explain.html"):
        with opened(browser, path.as_uri(), "light") as (page, said):
            found = walked(page, 60)
            assert found and not [one for one in found if not one["named"] or not one["seen"]]
            ids = {one["id"] for one in found}
            if page.locator("#charts").count():
                assert "charts" in ids
                page.focus("#charts > div")
                pressed(page, "ArrowRight", "ArrowRight")
                legend = page.inner_text("#charts > div:first-child .u-legend")
                assert legend.startswith("step2")
                pressed(page, "+")
                scale = "charts.get('loss').scales.x.max"
                assert page.evaluate(scale) < 40
                pressed(page, "0")
                assert page.evaluate(scale) == 40
            if page.locator("#timelines").count():
                assert "timelines" in ids
                page.focus("#timelines canvas")
                pressed(page, "Enter")
                assert "0F0" in page.locator("#timelines .tip").first.inner_text()
            if page.locator("#stepper").count():
                pressed(page, "ArrowRight", "ArrowRight", "ArrowLeft")
                assert page.inner_text("#where").startswith("step 2 of 12")
        assert not said
