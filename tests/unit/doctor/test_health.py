"""What a folder says of its run: going on, killed, finished."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from plait.checkpoint.folder import INDEX
from plait.cli.doctor import view
from plait.doctor import findings
from plait.doctor.findings import RunFinding
from plait.doctor.flight import FlightRecorder, Phase
from plait.errors import ConfigError
from plait.run.health import findings_of, status_of
from plait.run.logs import AGAIN, ENDED
from plait.run.rundir import RunFolder
from tests.helpers.records import gone

ERROR = "plait.errors.RunError: metrics.jsonl cannot be written"
METRICS = """{"step": 1, "loss": 2.0, "tokens": 10, "seconds": 0.5}
{"step": 2, "loss": 1.5, "tokens": 10, "seconds": 0.5}
{"ste"""


def a_run(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.plan.write_text("dp2\n")
    folder.config.write_text("[train]\nsteps = 2\n")
    folder.metrics.write_text(METRICS)
    return folder


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    recorder = FlightRecorder(0, 2, folder.doctor)
    recorder.enter(Phase.LOADING)
    status = status_of(tmp_path)
    assert (status["state"], status["step"], status["steps"]) == ("running", 2, 2)
    assert (status["step_seconds"], status["tokens_per_second"]) == (0.5, 20.0)
    assert status["unit"] == "tokens"
    folder.config.write_text("[train]\nsteps = 2\nglobal_batch = 10\n")
    assert status_of(tmp_path)["unit"] == "samples"
    assert status["ranks"][0]["doing"] == "loading the batch"
    assert status["last_checkpoint"] is None


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    assert status_of(tmp_path)["state"] == "ended"
    folder.summary.write_text("{}")
    assert status_of(tmp_path)["state"] == "finished"


def test_a_run_that_an_error_ended_is_not_well(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    gone(folder, 0).close()
    gone(folder, 1)
    handled = "Traceback (most recent call last):\n  File\nConnectionError: again\n"
    said = f"{handled}step 1\n{ENDED}\nTraceback (most recent call last):\n  File\n{ERROR}\n"
    folder.log(0).parent.mkdir()
    folder.log(0).write_text(said)
    found = findings_of(tmp_path)
    assert (found["state"], found["findings"]) == ("ended", [])
    assert found["errors"] == [{"rank": 0, "step": 0, "error": ERROR}]
    assert f"error: rank 0 after step 0: {ERROR}" in view(found)
    folder.log(0).write_text(f"{said}{AGAIN}\n{handled}step 2\n")
    (killed,) = findings_of(tmp_path)["errors"]
    assert killed["rank"] == 1 and "it was killed and left no error" in killed["error"]


def test_a_run_that_was_asked_to_stop_has_no_error(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    gone(folder, 0).close()
    gone(folder, 1).close()
    found = findings_of(tmp_path)
    assert found["errors"] == []
    assert "no rank left an error; the run stopped after step 2 of 2" in view(found)


def test_the_status_reads_beside_numbers_that_are_none(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    folder.metrics.write_text(METRICS.replace("0.5", '"0.5"', 1))
    assert status_of(tmp_path)["step_seconds"] == 0.5


@pytest.mark.parametrize("text", ["", '{"ste', None])
def test_steps_are_known_where_the_metrics_are_lost(tmp_path: Path, text: str | None) -> None:
    folder = a_run(tmp_path)
    saved = tmp_path / "checkpoints" / "step-00000002"
    saved.mkdir(parents=True)
    (saved / INDEX).write_text('{"files": []}')
    folder.summary.write_text("{}")
    if text is None:
        folder.metrics.unlink()
    else:
        folder.metrics.write_text(text)
    found = findings_of(tmp_path)
    assert (found["state"], found["step"]) == ("finished", 2)
    (finding,) = found["findings"]
    assert finding["kind"] == "corruption" and "holds 2 steps" in finding["cause"]
    assert str(folder.metrics) == finding["where"]
    status = status_of(tmp_path)
    assert (status["step"], status["loss"], status["findings"]) == (2, None, 1)


def test_a_run_without_a_step_has_lost_no_metrics(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    folder.metrics.write_text("")
    found = findings_of(tmp_path)
    assert (found["step"], found["findings"]) == (0, [])


def test_findings_are_read_back_beside_damaged_lines(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    finding = RunFinding("hang", 1, 4, "action 0F1", "lock", (0,), "a.py:3 in f", {"pid": 7})
    findings.add(folder.doctor, finding)
    with (folder.doctor / findings.FILE).open("a") as file:
        file.write('{"kind": "ha')
    (found,) = findings_of(tmp_path)["findings"]
    assert found == finding.as_dict()
    assert finding.text() == (
        "hang: rank 1 in step 4, action 0F1: lock; waits for rank 0; at a.py:3 in f"
    )


def test_a_rank_whose_record_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    folder.plan.write_text("dp3\n")
    for rank in range(3):
        FlightRecorder(rank, 3, folder.doctor).close()
    (folder.doctor / "rank-1.flight").write_bytes(b"\xff" * 99)
    (folder.doctor / "rank-2.flight").unlink()
    damaged, missing = findings_of(tmp_path)["findings"]
    assert (damaged["kind"], damaged["rank"], missing["rank"]) == ("corruption", 1, 2)
    assert "cannot be read" in damaged["cause"] and "was here, and is gone" in missing["cause"]
    assert status_of(tmp_path)["findings"] == 2


def test_a_rank_of_another_machine_is_no_finding(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    folder.plan.write_text("dp3\n")
    FlightRecorder(1, 3, folder.doctor).close()
    found = findings_of(tmp_path)
    assert (found["findings"], found["ranks_without_record"]) == ([], [0, 2])
    assert "rank 2  no record is here" in view(found)
    assert status_of(tmp_path)["findings"] == 0


def test_a_run_of_another_machine_is_not_called_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_run(tmp_path)
    folder.plan.write_text("dp1\n")
    recorder = FlightRecorder(0, 1, folder.doctor)
    assert status_of(tmp_path)["state"] == "running"
    monkeypatch.setattr(socket, "gethostname", lambda: "login")
    found = findings_of(tmp_path)
    assert (found["state"], found["errors"]) == ("unknown", [])
    assert "ask there whether it runs" in view(found)
    recorder.close()
    assert findings_of(tmp_path)["state"] == "ended"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder of a run"):
        findings_of(tmp_path)
    with pytest.raises(ConfigError, match="is no folder of a run"):
        status_of(tmp_path / "nowhere")


def test_a_run_that_hangs_before_its_first_step_keeps_its_findings(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.doctor.mkdir(parents=True)
    findings.add(folder.doctor, RunFinding("hang", 0, 1, "starting", "disk"))
    folder.remove_if_empty()
    assert findings.read(folder.doctor)
    (folder.doctor / findings.FILE).unlink()
    folder.remove_if_empty()
    assert not folder.path.exists()
