"""The pages of real runs in a headless Chromium: a small GPT that learns, under two plans, beside
the prediction for this machine. Pictures go where `PLAIT_PICTURES` names a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import SCREENS, draw, opened

pytestmark = pytest.mark.long

CONFIG = """
[model]
name = "gpt"
num_hidden_layers = 4
hidden_size = 128
num_attention_heads = 4
vocab_size = 256

[data]
name = "stdlib"
seq_len = 128

[train]
steps = 200
global_batch = 16
lr = 1e-3
warmup_steps = 20
schedule = "cosine"
clip_grad_norm = 1.0
"""
PLANS = ("pp2 mb4", "dp2:zero1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Path:
    """A folder with a run, its page, and the page of two plans compared."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "gpt.toml").write_text(CONFIG)
    plait(folder, "probe", "--quick")
    plait(folder, "train", "gpt.toml", "--plan", PLANS[0], "--out", "gpt")
    plait(folder, "report", "gpt", "--out", "report.html")
    plait(folder, "compare", "gpt.toml", "--plans", *PLANS, "--html", "compare.html")
    return folder


def plait(folder: Path, *words: str) -> None:
    """A command in a home of its own, whose measurements are those of now."""
    done = subprocess.run(
        [sys.executable, "-m", "plait", *words],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_run_has_learned_something(runs: Path) -> None:
    lines = (runs / "gpt" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 200 and losses[0] > 5 and sum(losses[-20:]) / 20 < 3


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", ["report", "compare"])
def test_its_pages_draw_themselves(name: str, screen: str, browser: Any, runs: Path) -> None:
    with opened(browser, (runs / f"{name}.html").as_uri(), screen) as (page, said):
        assert page.locator("canvas").count() >= 8
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert "predicted" in page.inner_text("#charts")
        if name == "compare":
            assert all(plan in page.inner_text("#charts") for plan in PLANS)
        if name == "report" or screen == "light":
            draw(page, f"{name}-{screen}", full_page=True)
    assert not said
