"""Hostile text in a browser: it is shown as text on every page, and nothing of it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from plait.explore.server import PageServer
from tests.browser.chromium import expect, opened
from tests.unit.cli.test_hostile_pages import HOSTILE, WRITTEN

LINK = "javascript:alert(1)//"
TEXTS = (HOSTILE, LINK, "\"'><svg onload=alert(1)>")
FIELDS = ("cluster", "devices", "batch", "sequence", "framework", "objective", "risk", "plan")


def watched(page: Any) -> list[str]:
    """The dialogs that a page opens from now on."""
    found: list[str] = []

    def note(dialog: Any) -> None:
        found.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", note)
    return found


@pytest.mark.parametrize("made", WRITTEN)
def test_it_runs_on_no_written_page(
    made: Callable[[str, Path], str], browser: Any, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(made(HOSTILE, tmp_path))
    with opened(browser, "about:blank", "light") as (page, said):
        dialogs = watched(page)
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        page.wait_for_timeout(100)
        assert "alert(1)" in page.inner_text("body")
        assert page.locator("img").count() == 0
        assert not dialogs
    assert not said


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_said_and_does_not_run_on_the_page_of_plans(
    text: str, browser: Any, server: PageServer
) -> None:
    with opened(browser, "about:blank", "light") as (page, said):
        dialogs = watched(page)
        model = json.dumps({"model_type": text, "hidden_size": 4})
        asked = [{name: text} for name in FIELDS[:-3]] + [{"model": text}, {"model": model}]
        for state in asked:
            page.goto("about:blank")
            page.goto(f"{server.url}#{urlencode(state)}")
            expect(page.locator("#error")).to_be_visible(timeout=60_000)
            assert page.inner_text("#error").strip()
        assert "alert(1)" in page.inner_text("#error")
        page.goto("about:blank")
        page.goto(f"{server.url}#{urlencode({'plan': text, 'tokens': text, 'price': text})}")
        page.wait_for_selector("#plans tbody tr")
        expect(page.locator("#notes")).to_contain_text(text)
        assert page.locator("img, svg, a:not(.skip)").count() == 0
        assert not dialogs
    assert not [line for line in said if "status of 400" not in line], said
