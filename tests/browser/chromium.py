"""Chromium without a window, and what a page says on its console."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
SCREENS = {
    "light": {"viewport": {"width": 1280, "height": 690}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 690}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 400, "height": 800}, "color_scheme": "light"},
}


def expect(locator: Any) -> Any:
    """What playwright expects of an element, waiting for it."""
    from playwright import sync_api

    return sync_api.expect(locator)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped where there is none."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: sh tests/browser/install.sh"
    )
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: sh tests/browser/install.sh")
    with sync_api.sync_playwright() as started:
        one = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-lcd-text"]
        )
        yield one
        one.close()


@contextmanager
def opened(browser: Any, url: str, screen: str) -> Iterator[tuple[Any, list[str]]]:
    """A page at an address, and what it has said; it asks for nothing from elsewhere."""
    context = browser.new_context(**SCREENS[screen])
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))

    def check(asked: Any) -> None:
        if not asked.url.startswith(("http://127.0.0.1:", "data:", "blob:", "file:")):
            said.append(asked.url)

    page.on("request", check)
    page.goto(url)
    yield page, said
    context.close()
