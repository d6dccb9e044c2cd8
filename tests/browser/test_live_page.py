"""The page of a run that goes on: it shows the steps as they come, and the console is still."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plait.cli.answer import Answer
from plait.cli.live import served
from tests.browser.chromium import expect, opened
from tests.unit.cli.test_report import CONFIG


def step(number: int) -> str:
    measured = {"loss": 3.0 / number, "grad_norm": 1.0, "lr": 0.1, "tokens": 64, "seconds": 0.1}
    return json.dumps({"step": number, **measured}) + "\n"


def test_it_follows_the_run(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)

    def train() -> Answer:
        assert answer.data is not None
        with opened(browser, answer.data["url"], "narrow") as (page, said):
            expect(page.locator("#headline")).to_contain_text("starting")
            (tmp_path / "plan.txt").write_text("dp2")
            with (tmp_path / "metrics.jsonl").open("a") as metrics:
                for number in (1, 2, 3):
                    metrics.write(step(number))
                    metrics.flush()
                    now = page.locator("#cards .card").first
                    expect(now).to_contain_text(f"{number} of")
            assert page.locator("#charts canvas").count() >= 5
            assert "predicted" in page.inner_text("#cards")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert not said
            pages.append(page.context.browser is browser)
        return Answer({"done": True})

    pages: list[bool] = []
    answer = served(tmp_path, train)
    assert answer.serve is not None
    last = answer.serve()
    assert last is not None and last.data == {"done": True} and pages == [True]
