"""A run that a signal ends leaves its evaluation off, and makes it when it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from plait.datasets.loader import InOrder
from plait.engine.loss import MetricSum
from plait.run.ending import signal_of_all
from plait.run.evaluation import Evaluations
from plait.run.hooks import RunStart, StepDone
from plait.run.place import RankProgress
from plait.run.rundir import RunFolder

SAMPLES: Any = [(torch.zeros(2), torch.tensor(0)) for _ in range(6)]


def begun(folder: Path, done: int, last: int, leaves_off: Callable[[], bool]) -> Evaluations:
    """The evaluations of every second step, of a run that goes on after `done` steps."""
    axis = SimpleNamespace(gather_objects=lambda value: [value])
    engine: Any = SimpleNamespace(
        measure=lambda batch, functions: [MetricSum(6.0, 2.0), MetricSum(1.0, 2.0)],
        world=SimpleNamespace(rank=0, axis=lambda name: axis),
    )
    hook = Evaluations(InOrder(SAMPLES, 2), 2, RunFolder(folder), leaves_off=leaves_off)
    hook.on_start(RunStart(engine, None, done + 1, last))
    return hook


def step(hook: Evaluations, number: int) -> None:
    result: Any = None
    hook.on_step(StepDone(number, 0.0, result))


def evaluated(folder: Path) -> list[int]:
    file = RunFolder(folder).evaluations
    return (
        [json.loads(row)["step"] for row in file.read_text().splitlines()] if file.exists() else []
    )


def never() -> bool:
    return False


def test_what_a_signal_cuts_short_is_made_when_the_run_goes_on(tmp_path: Path) -> None:
    words = iter([False] * 3 + [False, True])  # the second evaluation ends at its second batch
    hook = begun(tmp_path, 0, 9, lambda: next(words))
    for number in (1, 2, 3, 4):
        step(hook, number)
    assert hook.is_left_off
    hook.on_end()
    assert evaluated(tmp_path) == [2]
    again = begun(tmp_path, 4, 9, never)
    assert evaluated(tmp_path) == [2, 4]
    assert not again.is_left_off


def test_a_run_that_ends_early_has_no_last_evaluation(tmp_path: Path) -> None:
    hook = begun(tmp_path, 0, 9, never)
    for number in (1, 2, 3):
        step(hook, number)
    hook.on_end()
    assert evaluated(tmp_path) == [2]


def test_the_last_step_is_evaluated_once(tmp_path: Path) -> None:
    for done in (0, 3):  # the second time nothing is left to do
        hook = begun(tmp_path, done, 3, never)
        for number in range(done + 1, 4):
            step(hook, number)
        hook.on_end()
        assert evaluated(tmp_path) == [2, 3]


def test_the_last_evaluation_is_made_up_for_too(tmp_path: Path) -> None:
    words = iter([False] * 3 + [True])
    hook = begun(tmp_path, 0, 3, lambda: next(words))
    for number in (1, 2, 3):
        step(hook, number)
    hook.on_end()
    assert hook.is_left_off
    begun(tmp_path, 3, 3, never).on_end()
    assert evaluated(tmp_path) == [2, 3]


def test_a_signal_behind_the_last_step_is_that_of_the_end() -> None:
    ending = RankProgress.__new__(RankProgress)
    ending.signal = 0
    seat: Any = SimpleNamespace(board=SimpleNamespace(signal=15))
    ending._seat = seat
    assert ending.known_signal == 15
    axis = SimpleNamespace(gather_objects=lambda value: [0, value])
    world: Any = SimpleNamespace(axis=lambda name: axis)
    assert signal_of_all(ending, world) == 15
