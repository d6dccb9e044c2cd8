"""`plait report`: one page from the folder of a run; its numbers; its errors. The run is drawn by
hand, so all is known.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.cli import main
from plait.parallel.pipeline.actions import Kind
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.observed import observed_bubble, simulated_step
from plait.parallel.pipeline.schedules import make
from plait.parallel.pipeline.text import dumps
from plait.run.logs import ENDED
from plait.run.report_page import report_page
from plait.run.rundata import read_run
from plait.run.rundir import RunFolder
from plait.trace import Timeline
from plait.trace.chrome import mark_recoveries
from tests.helpers.records import gone

CONFIG = """
[model]
name = "gpt"
num_hidden_layers = 2
hidden_size = 16
num_attention_heads = 2
intermediate_size = 32
vocab_size = 64
[data]
name = "random"
seq_len = 8
[train]
steps = 3
global_batch = 8
[cluster]
name = "h100x8"
"""
COSTS = {Kind.FORWARD: 1e-3, Kind.BACKWARD: 2e-3, Kind.INPUT_GRAD: 1e-3, Kind.WEIGHT_GRAD: 1e-3}


def drawn(schedule: Any, num_stages: int) -> Timeline:
    return simulated_step(
        schedule,
        {(kind, stage): cost for kind, cost in COSTS.items() for stage in range(num_stages)},
    )


def write_run(folder: Path, plan: str, trace: Timeline, config: str = CONFIG) -> Path:
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text(config)
    (run / "plan.txt").write_text(f"{plan}\n")
    steps = [
        {"step": step, "loss": 2.0, "grad_norm": 1.0, "tokens": 64, "seconds": 0.1}
        for step in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    summary = {
        "steps": 2,
        "final_loss": 2.0,
        "tokens_per_second": 640.0,
        "traffic": {"pp": 1e6},
        "peak_memory": [3e8, 2e8],
        "memory_before": [1e8, 1.9e8],
    }
    (run / "summary.json").write_text(
        json.dumps({**summary, "state_memory": [{"parameters": 10, "optimizer": 20}] * 2})
    )
    (run / "trace.json").write_text(json.dumps(trace.to_chrome()))
    return run


def two_steps(schedule: Any, num_stages: int) -> Timeline:
    """The second begins a second later."""
    first = drawn(schedule, num_stages)
    second = drawn(schedule, num_stages)
    second.origin_seconds = 1.0
    return Timeline.merge([first.labelled(step=1), second.labelled(step=2)])


def report(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["report", str(run), *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


class Outside(HTMLParser):
    """What a page asks for from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.pictures = self.bars = 0
        self.policy: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.pictures += tag == "svg"
        self.bars += ("class", "track") in attrs
        self.asked += [
            f"{tag} {key}={value}"
            for key, value in attrs
            if key in ("src", "href", "srcset", "data")
        ]
        self.asked += [tag] if tag in ("link", "iframe") else []
        given = dict(attrs)
        if "http-equiv" in given:
            self.policy.append(str(given["content"]))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_the_simulated_step_of_a_run_without_noise_is_the_measured_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = lower(make(name, 2, 4))
    found = report(write_run(tmp_path, f"pp2:{name} mb4", two_steps(schedule, 4)), capsys)
    assert found["measured_step_seconds"] == pytest.approx(found["simulated_step_seconds"])
    assert found["measured_bubble_fraction"] == pytest.approx(found["simulated_bubble_fraction"])
    assert found["simulated_bubble_fraction"] == pytest.approx(observed_bubble(drawn(schedule, 4)))
    assert found["traced_steps"] == [1, 2]
    assert found["predicted_step_seconds"] > 0
    assert found["predicted_for"] == "h100x8"


def test_the_page_is_one_file_with_three_timelines_above_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, "pp2:1f1b mb4", two_steps(lower(make("1f1b", 2, 4)), 2))
    report(run, capsys)
    text = (run / "report.html").read_text()
    page = Outside()
    page.feed(text)
    assert page.asked == []
    # whatever its script does, the browser lets the page ask for nothing
    assert len(page.policy) == 1 and page.policy[0].startswith("default-src 'none'; style-src ")
    assert "http" not in page.policy[0] and "'self'" not in page.policy[0]
    assert page.pictures >= 4 and page.bars >= 2  # a legend, three timelines; memory, traffic
    places = [text.index(f"<h3>{word}") for word in ("predicted before", "simulated", "measured")]
    assert places == sorted(places)
    assert text.count(">1F0<") == 3
    report(run, capsys, "--out", str(tmp_path / "other.html"))
    assert (tmp_path / "other.html").read_text() == text


def test_a_report_draws_itself_in_a_notebook(tmp_path: Path) -> None:
    run = write_run(tmp_path, "pp2:1f1b mb4", two_steps(lower(make("1f1b", 2, 4)), 2))
    shown = plait.Report(run)
    frame = shown._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert frame.count('"') == 4  # nothing of the page ends the attribute
    assert "measured" in repr(shown)
    assert shown.numbers["traced_steps"] == [1, 2]


def test_without_a_prediction_the_page_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG.replace("h100x8", "h100x1")
    run = write_run(tmp_path, "pp2:1f1b mb4", two_steps(lower(make("1f1b", 2, 4)), 2), config)
    assert report(run, capsys)["predicted_step_seconds"] is None
    assert "needs 2 devices" in (run / "report.html").read_text()
    assert main(["report", str(run)]) == 0
    assert "not made: plan" in capsys.readouterr().out.replace("\n", " ")


def test_streams_and_own_schedules_and_plans_without_a_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, plan, schedule in (
        ("stream", "pp2:pipedream mb2", make("pipedream", 2, 2)),
        ("own", "pp2:1f1b mb3", make("gpipe", 2, 3)),
        ("flat", "dp2:zero1 mb2", make("1f1b", 1, 2)),
    ):
        (tmp_path / name).mkdir()
        run = write_run(
            tmp_path / name,
            plan,
            two_steps(schedule if schedule.asynchronous else lower(schedule), 2),
        )
        if name == "own":
            (run / "schedule.txt").write_text(dumps(schedule))
        found = report(run, capsys)
        assert found["simulated_step_seconds"] > 0
        if name == "own":
            assert found["measured_step_seconds"] == pytest.approx(found["simulated_step_seconds"])
            assert found["predicted_step_seconds"] is None


def test_bad_input_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(run: Path, message: str, *words: str) -> None:
        assert main(["report", str(run), *words]) == 2
        assert message in capsys.readouterr().err

    fails(tmp_path / "nowhere", "is no folder of a run")
    fails(tmp_path, "is no folder of a run")
    (tmp_path / "doctor").mkdir()
    fails(tmp_path, "plan.txt cannot be read")
    run = write_run(tmp_path, "pp2:1f1b mb4", two_steps(lower(make("1f1b", 2, 4)), 2))
    fails(run, "cannot write", "--out", str(tmp_path / "no" / "where.html"))
    (run / "trace.json").write_text("{}")
    fails(run, "is no trace of plait")
    (run / "trace.json").write_text('{"traceEvents": []}')
    fails(run, "has no steps to draw")
    (run / "trace.json").write_text("{")
    fails(run, "is no JSON")


def test_recoveries_and_their_cost_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = two_steps(lower(make("1f1b", 2, 4)), 2)
    run = write_run(tmp_path, "pp2:1f1b mb4", timeline)
    recovery = {
        "step": 1,
        "lost_ranks": [1],
        "cause": "rank 1 was killed by SIGKILL",
        "seconds": 2.5,
        "plan_before": "pp2:1f1b mb4",
        "plan_after": "dp1 mb8",
        "steps_repeated": 1,
        "moment": time.time(),
    }
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    costs = {"snapshots": {"count": 4, "seconds": 0.02}, "checkpoints": {"count": 0, "seconds": 0}}
    path.write_text(json.dumps({**summary, **costs, "recoveries": [recovery]}))
    trace = timeline.to_chrome()
    mark_recoveries(trace, [recovery], time.perf_counter() - 3.0)
    (moment,) = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert moment["args"] == recovery
    assert 2.9e6 < moment["ts"] < 4.0e6
    (run / "trace.json").write_text(json.dumps(trace))
    page = Path(report(run, capsys)["out"]).read_text()
    for said in ("SIGKILL", "2.50", "pp2:1f1b mb4, then dp1 mb8", "4 snapshots took 5.0 ms of"):
        assert said in page
    path.write_text(json.dumps({**summary, "recoveries": [{**recovery, "step": -1}]}))
    assert main(["report", str(run)]) == 2
    assert "recoveries.0.step" in capsys.readouterr().err


def test_a_prediction_of_ranks_that_share_cores_says_what_its_timeline_leaves_out(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path, "pp2:1f1b mb4", two_steps(lower(make("1f1b", 2, 4)), 2))
    data = read_run(run)
    assert data.prediction is not None
    assert "a core for each rank" not in report_page(data)
    numbers = {**data.prediction.numbers, "breakdown_seconds": {"compute": 0.1, "cores": 0.25}}
    shared = replace(data, prediction=replace(data.prediction, numbers=numbers))
    assert "fewer cores adds 250.0 ms to the predicted step" in report_page(shared)


def test_memory_is_told_whole_as_it_is_predicted_and_what_training_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, "pp2:1f1b mb4", two_steps(lower(make("1f1b", 2, 4)), 2))
    text = Path(report(run, capsys)["out"]).read_text()
    assert "<span>peak memory</span><b>300 MB</b><small>predicted " in text
    assert "What came after the model was begun is 200 MB." in text
    assert 'title="all else, at the peak: ' in text


def test_the_page_begins_with_what_happened_and_says_what_to_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, "pp2:1f1b mb4", two_steps(lower(make("1f1b", 2, 4)), 2))
    text = Path(report(run, capsys)["out"]).read_text()
    lead = text.index('<p class="lead">2 steps on 2 ranks under pp2 mb4; the loss went from 2 to 2')
    card = text.index("<span>tokens a second</span><b>640</b><small>predicted ")
    advice = text.index("What limits this run, and what to try next")
    assert lead < card < advice < text.index("Timelines</h2>")
    assert "By the prediction, " in text and "The fullest rank needs" in text
    assert "Try &#x27;" in text  # two ranks without a pipeline stand less idle
    assert "precision:bf16" not in text  # the run's own precision is kept
    data = json.loads(text.partition('id="drawn">')[2].partition("</script>")[0])
    captions = [one["caption"].partition(":")[0] for one in data["timelines"]]
    assert captions == ["measured", "predicted before the run, by the cost model", "simulated"]
    hints = [box[4] for lane in data["timelines"][2]["lanes"] for box in lane["boxes"]]
    assert any("micro-batch 3, 1.000 ms from" in hint for hint in hints)
    measured, promised, _ = data["timelines"]
    for over, under in zip(measured["lanes"], promised["lanes"], strict=True):
        starts = [box[:4] for box in under["boxes"] if not box[5]]
        assert starts and [box[:4] for box in over["above"]] == starts
        assert all("; predicted: " in box[4] for box in over["boxes"])
    assert data["runs"][0]["steps"][0]["loss"] == 2.0
    assert data["runs"][0]["predicted"]["step_seconds"] > 0


def test_hostile_text_of_a_run_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, "pp2:1f1b mb4", two_steps(lower(make("1f1b", 2, 4)), 2))
    hostile = "</script><script>alert(1)</script>"
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace("}", f', "note": "{hostile}"}}'))
    moved = run.rename(tmp_path / "<img src=x onerror=alert(1)>")
    text = Path(report(moved, capsys)["out"]).read_text()
    assert "<img" not in text and "<script>alert" not in text and "alert(1)" in text


def test_a_last_line_that_a_kill_has_cut_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, "pp2:1f1b mb4", two_steps(lower(make("1f1b", 2, 4)), 2))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    assert main(["report", str(run)]) == 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert main(["report", str(run)]) == 2
    assert "this is no JSON" in capsys.readouterr().err


def test_a_run_that_was_killed_has_a_page_with_its_course_and_its_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, "dp2", two_steps(lower(make("gpipe", 1, 1)), 1))
    for name in ("trace.json", "summary.json"):
        (run / name).unlink()
    (run / "logs").mkdir()
    error = "RuntimeError: <the disk> is full"
    said = f"{ENDED}\nTraceback (most recent call last):\n{error}\n"
    (run / "logs" / "rank-1.txt").write_text(said)
    for rank in (0, 1):
        gone(RunFolder(run), rank).close()
    found = report(run, capsys)
    assert (found["steps"], found["traced_steps"]) == (2, [])
    assert found["measured_step_seconds"] is None and found["predicted_step_seconds"] > 0
    text = Path(found["out"]).read_text()
    assert "this one has not" in text and "RuntimeError: &lt;the disk&gt; is full" in text
    (run / "metrics.jsonl").unlink()
    assert report(run, capsys)["steps"] == 0
