"""Chromium without a window, and what a page says on its console."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
SCREENS = {
    "light": {"viewport": {"width": 1280, "height": 690}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 690}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 400, "height": 800}, "color_scheme": "light"},
}
PATIENCE = 60_000
"""Milliseconds until a state that does not come is an error; how long it takes is no matter."""


def expect(locator: Any) -> Any:
    """What playwright expects of an element, waiting for it."""
    from playwright import sync_api

    sync_api.expect.set_options(timeout=PATIENCE)
    return sync_api.expect(locator)


def stop_the_clock(page: Any) -> None:
    """From now on a page's timers and frames go only as far as `page.clock.run_for` lets them."""
    page.clock.install(time=0)
    page.clock.pause_at(1000)


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


def draw(page: Any, name: str, **how: Any) -> None:
    """A picture of a page for the documents, where `PLAIT_PICTURES` names their folder.

    With Pillow it has 256 colours: a third of the bytes, and the eye sees no difference.
    """
    folder = os.environ.get("PLAIT_PICTURES")
    if not folder:
        return
    path = Path(folder) / f"{name}.png"
    page.screenshot(path=path, **how)
    if importlib.util.find_spec("PIL") is not None:
        image = importlib.import_module("PIL.Image").open(path).convert("RGB")
        image.quantize(256, method=1, dither=0).save(path, optimize=True)


@contextmanager
def opened(browser: Any, url: str, screen: str) -> Iterator[tuple[Any, list[str]]]:
    """A page at an address, and what it has said; it asks for nothing from elsewhere."""
    context = browser.new_context(**SCREENS[screen])
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
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
