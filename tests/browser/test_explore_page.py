"""The page of plans in a headless Chromium: no errors of the console, the data of `plait plan`,
hostile text as text, every width. It writes its screenshots where `PLAIT_PICTURES` names a folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.cli import main
from plait.cli.explore import opening_of
from plait.explain.case import case_of
from plait.explore.server import PageServer
from tests.browser.chromium import SCREENS, draw, expect, opened

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CLUSTERS = (
    *("h100x8", "h100x16", "h200x4", "b200x2", "a100-80gbx16", "a100-40gbx3"),
    *("mi300x", "t4x4", "l40sx8", "rtx4090x1"),
)
HOSTILE = "<script>document.title='caught'</script><img src=x onerror=document.title='caught'>"


@pytest.fixture(params=SCREENS)
def page(request: pytest.FixtureRequest, browser: Any, server: PageServer) -> Iterator[Any]:
    with opened(browser, server.url, request.param) as (one, said):
        one.wait_for_selector("#plans tbody tr")
        one.name = request.param
        yield one
    assert not [line for line in said if "status of 400" not in line], said


def headline(page: Any) -> str:
    page.wait_for_selector("#results:not(.waiting)")
    return page.inner_text("#headline")


def test_the_page_shows_plans_at_every_width(page: Any, server: PageServer) -> None:
    assert "h100x512, 512 devices" in headline(page)
    page.wait_for_selector("#scatter canvas")
    page.wait_for_selector("#grid[aria-label]")
    page.wait_for_selector("#timeline canvas")
    assert "bubble" in page.inner_text("#grid-cards")
    page.click("#rows-box summary")
    assert "time: " in page.inner_text(
        "#rows"
    ) and "sources, on more than 64 devices" in page.inner_text("#rows")
    page.click("#rows-box summary")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("scrollTo(0, 0)")
    whole = page.name == "narrow"
    if not whole:
        page.set_viewport_size({"width": 1280, "height": 880})
    clip = {"x": 0, "y": 0, "width": 400, "height": 2000} if whole else None
    draw(page, f"explore-{page.name}", full_page=whole, clip=clip)


def test_its_data_are_those_of_plait_plan(
    browser: Any, server: PageServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    known = {"model": dict(opening_of("gpt2", None).tables["model"])}
    pasted = tmp_path / "config.json"
    pasted.write_text(json.dumps(known["model"]))
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    for cluster in CLUSTERS:
        capsys.readouterr()
        main(["plan", str(pasted), "--cluster", cluster, "--json"])
        expected = json.loads(capsys.readouterr().out)
        given = {"model": pasted.read_text(), "cluster": cluster}
        assert page.evaluate("(choices) => ask('/plan.json', choices)", given) == expected
    context.close()


def test_what_is_wrong_is_said_on_the_page_and_hostile_text_is_text(page: Any) -> None:
    page.fill("#cluster", "h10x8")
    page.wait_for_selector("#error:not([hidden])")
    assert "unknown preset 'h10'" in page.inner_text("#error")
    page.fill("#cluster", "h100x8")
    page.wait_for_selector("#error[hidden]", state="attached")
    page.click("#paste-box summary")
    page.fill("#paste", json.dumps({"name": HOSTILE}))
    page.wait_for_selector("#error:not([hidden])")
    assert "<script>" in page.inner_text("#error") and page.title() == "plait explore"
    page.fill("#paste", '{"model_type": "llama"}')
    expect(page.locator("#error")).to_contain_text("needs")


def test_a_plan_is_selected_by_keys_and_stands_in_the_address(
    page: Any, server: PageServer
) -> None:
    page.focus("#plans tbody tr:nth-child(3) button")
    page.keyboard.press("Enter")
    plan = page.inner_text("#plans tbody tr:nth-child(3) button")
    assert page.inner_text("#chosen") == plan
    link = page.evaluate("location.href")
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector("#plans tbody tr")
    assert page.inner_text("#chosen") == plan
    page.select_option("#export", "deepspeed")
    expect(page.locator("#exported pre")).to_contain_text("train_batch_size")


def test_the_timeline_is_zoomed_by_keys(page: Any) -> None:
    page.wait_for_selector("#timeline canvas")
    canvas = page.locator("#timeline canvas").first
    before = canvas.evaluate("(one) => one.toDataURL()")
    canvas.focus()
    page.keyboard.press("+")
    assert canvas.evaluate("(one) => one.toDataURL()") != before
    page.keyboard.press("0")
    assert canvas.evaluate("(one) => one.toDataURL()") == before


PLANS = (
    "dp64:zero3 mb2",
    "tp8:1d,sp pp8:interleaved,v4 dp16:zero1,replicate2 mb64",
    "dp32:local,every500 tp64:2.5d,depth4",
    "ep16 dp16:zero2,offload cp4:ulysses tp27:3d pp8:zb-h1 mb32",
    "tp16:2d pp4:dualpipev mb8 remat:full",
)


def test_a_strategy_of_the_plan_is_stepped_through(page: Any) -> None:
    page.focus("#explain-box summary")
    page.keyboard.press("Enter")
    expect(page.locator("#where")).to_contain_text("step 1 of ")
    page.fill("#term", "dp2:zero3")
    page.keyboard.press("Tab")
    expect(page.locator("#idea")).to_contain_text("A weight lives in shards")
    page.click("#forward")
    assert page.inner_text("#where").startswith("step 2 of 12")
    assert page.inner_text("#panels").count("rank ") == 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.fill("#term", HOSTILE)
    page.keyboard.press("Tab")
    expect(page.locator("#idea")).to_contain_text("<script>")
    assert page.title() == "plait explore"
    if page.name == "light":
        for plan in PLANS:
            for term in page.evaluate("(plan) => smallTerms(plan)", plan):
                case_of(term)
