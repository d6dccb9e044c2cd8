"""The page of plans without a server: the same Python in a tab, its data those of `plait plan`.

Python for the browser is the npm package of Pyodide; `PLAIT_PYODIDE` names one that is there.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import math
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from plait.cli.explore import in_a_tab
from tests.browser.chromium import expect, opened

BUILD = Path(__file__).parents[2] / "docs" / "site" / "explore" / "build.py"
QUESTIONS = (
    {"cluster": "h100x8"},
    {"cluster": "h100x1024", "model": "llama3-8b", "top": "20"},
    {"cluster": "h200x64", "model": "llama3-70b"},
    {"cluster": "a100-80gbx16", "model": "mistral-7b", "framework": "megatron-core"},
    {"cluster": "b200x8", "model": "qwen3-30b-a3b"},
    {"cluster": "t4x4", "model": "gpt2", "batch": "64"},
    {"cluster": "l40sx8", "model": "gpt2-xl", "objective": "memory"},
    {"cluster": "mi300xx8", "model": "qwen2.5-7b", "risk": "0.05"},
    {"cluster": "rtx4090x1", "model": "gpt2", "sequence": "512"},
    {"cluster": "a100-40gbx3", "model": "gpt2", "explain": "1"},
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    given = os.environ.get("PLAIT_PYODIDE")
    if given is None and shutil.which("npm") is None:
        pytest.skip("there is no npm, which brings Pyodide")
    spec = importlib.util.spec_from_file_location("build_of_the_page", BUILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.build(folder, Path(given) if given else None)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"npm cannot bring Pyodide here: {error}")
    handler = functools.partial(Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_tab_answers_as_plait_plan_does_and_says_its_progress(browser: Any, site: str) -> None:
    with opened(browser, site, "light") as (page, said):
        expect(page.locator("#headline")).to_contain_text("Python")
        page.wait_for_selector("#plans tbody tr", timeout=120_000)
        assert "h100x512, 512 devices" in page.inner_text("#headline")
        here = in_a_tab()
        for question in QUESTIONS:
            found = page.evaluate("(choices) => ask('/plan.json', choices)", question)
            expected = json.loads(here("/plan.json", urlencode(question)))
            assert not differences(found, expected), question
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not said


def test_a_tab_says_what_it_cannot_do(browser: Any, site: str) -> None:
    with opened(browser, f"{site}#cluster=h10x8", "narrow") as (page, said):
        page.wait_for_selector("#error:not([hidden])", timeout=120_000)
        assert "unknown preset 'h10'" in page.inner_text("#error")
        page.fill("#cluster", "local")
        expect(page.locator("#error")).to_contain_text("cannot measure this machine")
    assert not said


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two JSON values differ, numbers by more than 1e-9 of themselves."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        parts = [(found[key], expected[key], f"{path}.{key}") for key in expected]
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        parts = [
            (one, other, f"{path}[{index}]")
            for index, (one, other) in enumerate(zip(found, expected, strict=True))
        ]
    elif isinstance(expected, float) and isinstance(found, (int, float)):
        # Remainders of sums are zero in one Python and 1e-16 in another.
        return [] if math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12) else [path]
    else:
        return [] if found == expected else [path]
    return [line for one, other, name in parts for line in differences(one, other, name)]
