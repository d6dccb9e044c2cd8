"""Hostile text is text on every page: a page has the same elements with it as without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from plait.cli import explain_page, schedule_page
from plait.cli.explore import beginning, opening_of
from plait.doctor.findings import RunFinding
from plait.explain.explanation import explain
from plait.explore.html import LIVE, TAB, drawing
from plait.explore.html import page as explore_page
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.schedules import make
from plait.parallel.pipeline.simulate import simulate
from plait.run import comparison
from plait.run.report_page import pictures_of, report_page
from plait.run.rundata import read_run
from plait.trace import Timeline
from plait.trace.page import Drawing
from plait.verify.page import page as verify_page
from plait.verify.record.compare import Difference
from plait.verify.report import Report
from tests.unit.cli.test_comparison import row
from tests.unit.cli.test_report import two_steps, write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'`${alert(1)}"
PLAIN = "plain"


class Elements(HTMLParser):
    """The elements of a page with the names of their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def report(word: str, folder: Path) -> str:
    run = write_run(folder, "pp2:1f1b mb4", two_steps(lower(make("1f1b", 2, 4)), 2))
    metrics = run / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(f"{json.dumps({**step, word: word})}\n" for step in steps))
    summary = json.loads((run / "summary.json").read_text())
    lost = {"step": 1, "lost_ranks": [1], "cause": word, "plan_before": "dp2", "plan_after": word}
    state = [{word: 10}] * 2
    changed = {**summary, "recoveries": [lost], "state_memory": state, "traffic": {word: 1e6}}
    (run / "summary.json").write_text(json.dumps(changed))
    (run / "doctor").mkdir()
    finding = asdict(RunFinding("nan", 1, 2, word, word, line=word, details={word: word}))
    (run / "doctor" / "findings.jsonl").write_text(f"{json.dumps(finding)}\n")
    data = read_run(run)
    return report_page(data, Drawing(*drawing(pictures_of(data))), [word])


def compared(word: str, folder: Path) -> str:
    rows = [{**row(word), "traffic": {word: 1.0}, "state_memory": [{word: 1}]}]
    runs = [comparison.ComparedRun([{"step": 1, "loss": 1.0, word: word}], None, [word])]
    script = Drawing(*drawing(comparison.pictures_of(rows, [Timeline(0)], runs)))
    return comparison.html(word, rows, [Timeline(0)], runs, script)


def scheduled(word: str, folder: Path) -> str:
    schedule = make("1f1b", 2, 2)
    object.__setattr__(schedule, "name", word)
    return schedule_page.html(schedule, simulate(schedule))


def explained(word: str, folder: Path) -> str:
    one = explain("dp2")
    for step in one.steps:
        object.__setattr__(step, "action", word)
        for note in step.notes:
            for tensor in (*note.operands, *note.results):
                object.__setattr__(tensor, "name", word)
    object.__setattr__(one, "term", word)
    return explain_page.html(one)


def verified(word: str, folder: Path) -> str:
    wrong = [Difference(1, kind, word, 1.0) for kind in ("loss", "grad", "param")]
    return verify_page(Report(wrong, [word], [], 1e-10, 1, plan=word, notes=[word]))


def explored(word: str, folder: Path) -> str:
    return explore_page({**beginning(opening_of("gpt2", None)), "name": word})[0]


def in_a_tab(word: str, folder: Path) -> str:
    return explore_page({"name": word, word: word}, TAB)[0]


def live(word: str, folder: Path) -> str:
    return explore_page({word: word}, LIVE)[0]


WRITTEN = (report, compared, scheduled, explained, verified)
PAGES = (*WRITTEN, explored, in_a_tab, live)


@pytest.mark.parametrize("made", PAGES)
def test_hostile_text_adds_no_element(made: Callable[[str, Path], str], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("hostile", "plain")]
    for folder in folders:
        folder.mkdir()
    hostile = Elements(made(HOSTILE, folders[0]))
    plain = Elements(made(PLAIN, folders[1]))
    assert hostile.found == plain.found
    assert "alert(1)" in hostile.text
