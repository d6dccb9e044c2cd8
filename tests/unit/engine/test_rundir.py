"""Which folder a run may use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.checkpoint.folder import write_index
from plait.engine.runlock import held
from plait.errors import CheckpointError, ConfigError
from plait.run.rundir import RunFolder, auto_source, fresh_run, latest_run, new_run, resumed_run


def _run_with(path: Path, *steps: int) -> RunFolder:
    folder = RunFolder(path)
    for step in steps:
        folder.checkpoint(step).mkdir(parents=True)
        write_index(folder.checkpoint(step), {"files": []})
    return folder


def test_a_new_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    runs = [new_run(None, "gpt", tmp_path) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(run.path.is_dir() and run.path.name.startswith("gpt-") for run in runs)


def test_an_empty_folder_may_be_used_and_a_full_one_may_not(tmp_path: Path) -> None:
    assert new_run(tmp_path / "out", "gpt").path.is_dir()
    assert new_run(tmp_path / "out", "gpt").path.is_dir()
    (tmp_path / "out" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"not empty.*--resume"):
        new_run(tmp_path / "out", "gpt")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be made: Not a directory; name .*--out"):
        new_run(tmp_path / "file" / "out", "gpt")


@pytest.mark.parametrize("name", ["doctor", "logs"])
def test_a_folder_inside_that_takes_no_files_is_named(tmp_path: Path, name: str) -> None:
    run = _run_with(tmp_path / "run", 10).path
    (run / name).touch()
    with pytest.raises(ConfigError, match=rf"run/{name} takes no files; name .*--out"):
        resumed_run(run, None, "gpt")


def test_a_run_begins_only_where_its_checkpoints_can_be_written(tmp_path: Path) -> None:
    """It would train to its end, and then say that nothing was saved."""
    (tmp_path / "plan.txt").write_text("dp1\n")
    (tmp_path / "checkpoints").touch()
    with pytest.raises(ConfigError, match=r"/checkpoints takes no files; name .*--out"):
        fresh_run(tmp_path, "gpt")


def test_a_run_has_a_checkpoint_once_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000999.tmp").mkdir(parents=True)
    assert not RunFolder(tmp_path).has_checkpoint
    assert _run_with(tmp_path, 20).has_checkpoint


@pytest.mark.parametrize("source", ["run", "run/checkpoints/step-00000010"])
def test_a_run_continues_in_its_folder(tmp_path: Path, source: str) -> None:
    _run_with(tmp_path / "run", 10)
    folder, checkpoint = resumed_run(tmp_path / source, None, "gpt")
    assert folder.path == tmp_path / "run"
    assert checkpoint == RunFolder(tmp_path / "run").checkpoint(10)


def test_a_run_continues_elsewhere_when_both_are_named(tmp_path: Path) -> None:
    _run_with(tmp_path / "run", 10)
    folder, checkpoint = resumed_run(tmp_path / "run", tmp_path / "new", "gpt")
    assert folder.path == tmp_path / "new"
    assert checkpoint.is_relative_to(tmp_path / "run")


def test_without_a_folder_the_latest_run_of_the_name_continues(tmp_path: Path) -> None:
    _run_with(tmp_path / "gpt-1", 10)
    (tmp_path / "gpt-2").mkdir()
    _run_with(tmp_path / "mlp-3", 10)
    folder, _ = resumed_run(None, None, "gpt", tmp_path)
    assert folder.path == tmp_path / "gpt-1"


def test_nothing_to_resume_from_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run of 'gpt'"):
        resumed_run(None, None, "gpt", tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        resumed_run(tmp_path, None, "gpt")
    with pytest.raises(CheckpointError, match="is no folder"):
        resumed_run(tmp_path / "nowhere", None, "gpt")


def test_latest_is_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    folder = _run_with(tmp_path / "gpt-1", 10, 20)
    word = Path("latest")
    assert resumed_run(word, None, "gpt", tmp_path)[1].name == "step-00000020"
    assert resumed_run(word, tmp_path / "gpt-1", "gpt")[1].name == "step-00000020"
    (folder.checkpoint(20) / "checkpoint.json").write_text("{")  # half copied
    assert resumed_run(word, None, "gpt", tmp_path)[1].name == "step-00000010"
    with pytest.raises(CheckpointError, match="no run of 'mlp'"):
        resumed_run(word, None, "mlp", tmp_path)


def test_auto_continues_or_starts_afresh(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for _ in range(2):  # nothing there, then what a start has made
        assert auto_source(out, "gpt") is None
        assert fresh_run(out, "gpt").path == out
    (out / "plan.txt").write_text("dp1")
    (out / "metrics.jsonl").touch()
    assert auto_source(out, "gpt") is None
    assert fresh_run(out, "gpt").path == out  # killed before its first checkpoint
    _run_with(out, 10)
    assert auto_source(out, "gpt") == out
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not empty"):
        fresh_run(tmp_path / "other", "gpt")


def test_a_plan_of_somebodys_own_is_no_run_to_start_over(tmp_path: Path) -> None:
    """The file would be overwritten."""
    (tmp_path / "plan.txt").write_text("step one: call Bob\nstep two: rest\n")
    with pytest.raises(ConfigError, match="it holds no run that --resume could continue"):
        fresh_run(tmp_path, "gpt")
    (tmp_path / "plan.txt").write_text("")  # cut off by a kill
    assert fresh_run(tmp_path, "gpt").path == tmp_path


def test_a_folder_that_is_taken_gets_a_cure_that_works(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"not empty; .* no run that --resume could continue"):
        new_run(tmp_path, "gpt")
    (tmp_path / "plan.txt").write_text("dp1")
    with pytest.raises(ConfigError, match="start the run that is there over with --resume auto"):
        new_run(tmp_path, "gpt")
    _run_with(tmp_path, 10)
    with pytest.raises(ConfigError, match="continue what is there with --resume /"):
        new_run(tmp_path, "gpt")


def test_the_latest_run_of_any_name_is_the_one_written_last(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        latest_run(tmp_path)
    for number, name in enumerate(("gpt-1", "mlp-2", "gpt-3")):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.plan.touch()
        folder.metrics.touch()
        for path in (folder.plan, folder.metrics, folder.path):
            os.utime(path, (number, number))
    (tmp_path / "compare.html").touch()
    os.utime(tmp_path / "mlp-2" / "metrics.jsonl", (9, 9))
    assert latest_run(tmp_path) == tmp_path / "mlp-2"


HOLDER = """
import sys
from pathlib import Path
from plait.engine.runlock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_do_not_share_a_folder_and_a_killed_one_leaves_it_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=rf"in use by another run \(process {holder.pid}\)"),
            held(tmp_path),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with held(tmp_path), pytest.raises(ConfigError, match="in use"), held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    assert new_run(tmp_path, "gpt").path == tmp_path


@pytest.mark.parametrize("name", ["checkpoints/latest", "metrics.jsonl", "summary.json"])
def test_a_folder_where_a_file_belongs_is_refused_before_the_run(tmp_path: Path, name: str) -> None:
    run = _run_with(tmp_path / "run", 1)
    (run.path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name} is a folder, and a run writes a file there"):
        resumed_run(run.path, None, "gpt")


@pytest.mark.parametrize(
    ("checkpoint", "below"),
    [
        ("run/best", "."),
        ("run/checkpoints/step-00000002", "."),
        ("best", "run"),
        ("checkpoints/step-00000002", "run"),
        ("step-00000002", "run/checkpoints"),
    ],
)
def test_the_run_of_a_checkpoint_is_found_from_anywhere(
    checkpoint: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / below)
    assert RunFolder.of(Path(checkpoint)).path.resolve() == (tmp_path / "run").resolve()


def test_a_run_is_resumed_from_its_best_weights_in_its_own_folder(tmp_path: Path) -> None:
    folder = _run_with(tmp_path / "run", 4)
    folder.best.mkdir()
    write_index(folder.best, {"files": []})
    resumed, checkpoint = resumed_run(folder.best, None, "gpt")
    assert (resumed.path, checkpoint) == (folder.path, folder.best)
