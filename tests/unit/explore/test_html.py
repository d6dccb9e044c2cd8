"""The page is one text with everything in it, and nothing in it comes from elsewhere."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch

from benchmarks.planner.bars import behind
from benchmarks.planner.rows import cases

from plait.errors import ConfigError
from plait.explore.html import drawing, page, rows_behind_bars
from plait.predict.cost.bars import stored
from plait.toml import read_toml
from tests.architecture.source import PACKAGE, ROOT


def test_the_page_holds_its_script_its_style_and_its_data() -> None:
    html, policy = page({"name": "</script><script>alert(1)</script>"})
    assert "alert(1)</script>" not in html
    data = re.search(r'id="beginning">(.*?)</script>', html)
    assert data is not None
    assert json.loads(data[1]) == {"name": "</script><script>alert(1)</script>"}
    assert "uPlot" in html and "/*" + "SCRIPT*/" not in html
    assert policy.count("sha256-") == 2 and "'unsafe" not in policy


def test_the_drawing_of_a_report_holds_its_data() -> None:
    steps = [{"step": 1, "loss": 2.5, "note": "</script><script>alert(1)</script>"}]
    data = {"runs": [{"name": "dp2", "steps": steps}], "timelines": []}
    part, policy = drawing(data)
    assert "alert(1)</script>" not in part and "uPlot" in part
    found = re.search(r'id="drawn">(.*?)</script>', part)
    assert found is not None and json.loads(found[1]) == data
    assert policy.startswith("default-src 'none'; ") and policy.count("sha256-") == 1


def test_the_rows_behind_the_bars_are_the_published_ones() -> None:
    assert rows_behind_bars() == behind(cases()[0])
    for kind, places in rows_behind_bars().items():
        assert places.keys() == stored()[kind].keys()


def test_the_page_asks_nobody_else_and_reads_no_text_as_html() -> None:
    folder = PACKAGE / "explore" / "page"
    own = "\n".join(path.read_text() for path in folder.glob("*.*"))
    assert not re.findall(
        r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", own
    )


def test_the_wheel_carries_every_file_of_the_page() -> None:
    project = read_toml(ROOT / "pyproject.toml", ConfigError)
    patterns = project["tool"]["setuptools"]["package-data"]["plait"]
    files = [path for path in (PACKAGE / "explore" / "page").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        name = path.relative_to(PACKAGE).as_posix()
        assert any(
            fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns
        ), name
