"""The weights in `best/` are those of an evaluation that the run still has."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.checkpoint import save
from plait.datasets.loader import InOrder
from plait.engine.loss import MetricSum
from plait.errors import SaveFailed
from plait.run.evaluation import Evaluations
from plait.run.hooks import RunStart, StepDone
from plait.run.rundir import RunFolder

SAMPLES: Any = [(torch.zeros(2), torch.tensor(0)) for _ in range(2)]


class Run:
    """A run that is evaluated after every step, by given losses."""

    def __init__(
        self, folder: Path, done: int, loss: float = 0.0, patience: int | None = None
    ) -> None:
        self.folder = RunFolder(folder)
        self.step = done
        self.loss = loss
        self.is_full = False
        axis = SimpleNamespace(gather_objects=lambda value: [value])
        engine: Any = SimpleNamespace(
            measure=lambda batch, functions: [MetricSum(self.loss, 1.0), MetricSum(1.0, 1.0)],
            world=SimpleNamespace(rank=0, axis=lambda name: axis),
            save=self._save,
        )
        loader: Any = SimpleNamespace(state_dict=dict)
        batches = InOrder(SAMPLES, 2)
        self.hook = Evaluations(batches, 1, self.folder, keep_best=True, patience=patience)
        self.hook.on_start(RunStart(engine, loader, done + 1, 9))

    def go(self, losses: Sequence[float]) -> None:
        nothing: Any = None
        for loss in losses:
            self.loss = loss
            self.step += 1
            self.hook.on_step(StepDone(self.step, 0.0, nothing))

    def best(self) -> int:
        return int(json.loads((self.folder.best / "checkpoint.json").read_text())["meta"]["step"])

    def _save(self, path: Path, loader: object) -> None:
        if self.is_full:
            raise SaveFailed("no space is left on the disk")
        save(path, [], {"step": self.step})


def test_the_best_are_kept_over_a_resume(tmp_path: Path) -> None:
    Run(tmp_path, 0).go([3.0, 2.0, 4.0])
    again = Run(tmp_path, 3)
    again.go([2.5])
    assert again.best() == 2
    again.go([1.5])
    assert again.best() == 5


def test_a_save_that_failed_is_made_when_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    run.go([3.0])
    run.is_full = True
    with pytest.raises(SaveFailed, match="no space"):
        run.go([2.0])
    again = Run(tmp_path, 2, 2.0)  # the checkpoint of the step was whole
    again.go([2.5])
    assert again.best() == 2


def test_weights_of_a_step_that_comes_again_give_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path, 0).go([3.0, 2.0, 1.0])
    again = Run(tmp_path, 1)
    told = "best/ is of step 3, and the run goes on after step 1: the next evaluation takes its"
    assert told in capsys.readouterr().err
    again.go([6.0])
    assert again.best() == 2
    again.go([5.0, 5.5])
    assert again.best() == 3


def test_a_rollback_forgets_the_weights_of_later_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    run.go([3.0, 1.0])
    run.hook.on_rollback(1)
    run.step = 1
    run.go([4.0, 3.5])
    assert run.best() == 3


def test_weights_are_kept_from_a_resume_on_that_asks_for_them(tmp_path: Path) -> None:
    first = Run(tmp_path, 0)
    first.hook.keep_best = False
    first.go([1.0])
    again = Run(tmp_path, 1)
    again.go([2.0, 3.0])
    assert again.best() == 2


def test_an_evaluation_of_steps_that_are_done_again_is_none(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    run.go([3.0, 2.0, 1.0])
    assert run.hook.newest() is not None
    run.hook.on_rollback(2)
    assert run.hook.newest() is None
    run.step = 2
    run.go([1.5])
    newest = run.hook.newest()
    assert newest is not None
    assert (newest[0], newest[1]["loss"]) == (3, 1.5)


def test_an_end_by_patience_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, 0, patience=2)
    run.go([3.0, 2.0, 4.0, 2.0])
    assert run.hook.ends
    run.hook.on_end()
    assert capsys.readouterr().err == (
        "plait: no better evaluation since step 2 ([eval] patience = 2); the run ends after "
        "step 4 of 9\n"
    )
    lost = Run(tmp_path / "lost", 0, patience=1)
    (tmp_path / "lost").mkdir()
    lost.go([math.nan])
    lost.hook.on_end()
    assert "no evaluation has a finite loss" in capsys.readouterr().err


def test_an_end_at_the_last_step_is_not_by_patience(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, 6, patience=2)
    run.go([1.0, 2.0, 3.0])
    run.hook.on_end()
    assert capsys.readouterr().err == ""


def test_a_better_evaluation_begins_the_patience_anew(tmp_path: Path) -> None:
    Run(tmp_path, 0).go([2.0, 3.0, 1.0])
    assert not Run(tmp_path, 3, patience=1).hook.ends
