"""The page as one text: its style, its script, the chart library and what it begins with, inlined.

So it needs one request, no network, and runs from any host.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final

from plait.values import JsonMapping

STYLES: Final = ("uplot/uPlot.min.css", "colours.css", "page.css", "pictures.css")
WRITTEN: Final = ("timeline.js", "curves.js", "report.js")
"""Scripts of a page that is written once."""
STEPPER: Final = ("stepper.js",)
CHARTS: Final = ("uplot/uPlot.iife.min.js", "words.js", "charts.js")


POLICY: Final = 'http-equiv="Content-Security-Policy"'


@dataclass(frozen=True)
class PageFiles:
    """The files of one page: its HTML, and scripts beside those that all pages have."""

    html: str
    scripts: tuple[str, ...]


EXPLORE: Final = PageFiles("page.html", ("timeline.js", "grid.js", *STEPPER, "page.js", "terms.js"))
TAB: Final = PageFiles("page.html", ("timeline.js", "grid.js", "tab.js", "page.js"))
LIVE: Final = PageFiles("live.html", ("curves.js", "live.js"))


def page(beginning: JsonMapping, files: PageFiles = EXPLORE) -> tuple[str, str]:
    """The page that begins with some data, and its Content-Security-Policy.

    The policy names the hashes of the page's own scripts and styles, so that no other runs.
    """
    folder = resources.files("plait.explore").joinpath("page")
    style = "\n".join(folder.joinpath(name).read_text("utf-8") for name in STYLES)
    script = "\n".join(
        folder.joinpath(name).read_text("utf-8") for name in (*CHARTS, *files.scripts)
    )
    data = json.dumps(beginning).replace("<", "\\u003c")
    html = folder.joinpath(files.html).read_text("utf-8")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    if files is TAB:  # which has no server to send a header
        html = html.replace("<head>", f'<head>\n<meta {POLICY} content="{_of_tab(policy)}">', 1)
    for mark, text in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ("/*DATA*/", data)):
        before, found, after = html.partition(mark)
        assert found, mark
        html = f"{before}{text}{after}"
    return html, f"{policy}; frame-ancestors 'none'"


def _of_tab(policy: str) -> str:
    """The policy of a page whose Python runs in a worker from beside it."""
    return policy.replace("script-src ", "worker-src 'self'; script-src 'wasm-unsafe-eval' ", 1)


def rows_behind_bars() -> JsonMapping:
    """Kind (time, memory) -> reach -> source -> the published runs that its error bars are from.

    `benchmarks.planner.bars` writes the file.
    """
    file = resources.files("plait.explore").joinpath("page", "rows.json")
    rows: JsonMapping = json.loads(file.read_text("utf-8"))
    return rows


def drawing(data: JsonMapping, scripts: Sequence[str] = WRITTEN) -> tuple[str, str]:
    """The curves and timelines of a page that is written once, and that page's policy.

    `data` has `runs` (a name and steps each) for the place `charts`, and `timelines` for the place
    of that name. Other `scripts` have data of their own. By the policy the page asks for nothing,
    and runs no script but this one.
    """
    folder = resources.files("plait.explore").joinpath("page")
    styles = (*STYLES[:2], "pictures.css")
    style = "\n".join(folder.joinpath(name).read_text("utf-8") for name in styles)
    names = (*CHARTS, *scripts)
    script = "\n".join(folder.joinpath(name).read_text("utf-8") for name in names)
    text = json.dumps(data).replace("<", "\\u003c")
    part = (
        f"<style>{style}</style>"
        f'<script type="application/json" id="drawn">{text}</script><script>{script}</script>'
    )
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {_hash(script)}"
    return part, policy


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
