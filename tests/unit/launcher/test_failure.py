"""A failure survives its journey through a file as the error that it was."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from plait import errors
from plait.launcher.failure import Failure, died_silently, read_failures


def _caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


@pytest.mark.parametrize("kind", [errors.PlanError, errors.NonFiniteLoss, errors.CheckpointError])
def test_an_error_of_the_tree_keeps_its_class_message_and_exit_code(
    kind: type[errors.PlaitError], tmp_path: Path
) -> None:
    Failure.of(_caught(kind("3 layers on 4 stages")), rank=2).write(tmp_path)
    error = read_failures(tmp_path)[0].as_error()
    assert type(error) is kind
    assert str(error) == "3 layers on 4 stages"
    assert error.exit_code == kind.exit_code


def test_any_other_error_names_its_rank_and_shows_where(tmp_path: Path) -> None:
    Failure.of(_caught(ZeroDivisionError("by zero")), rank=3).write(tmp_path)
    error = read_failures(tmp_path)[0].as_error()
    assert type(error) is errors.RankFailed
    assert "rank 3 failed: ZeroDivisionError: by zero" in str(error)
    assert "test_failure.py" in str(error)


def test_the_earliest_failure_comes_first(tmp_path: Path) -> None:
    for rank in (1, 0, 2):
        Failure.of(_caught(ValueError()), rank).write(tmp_path)
    assert [failure.rank for failure in read_failures(tmp_path)] == [1, 0, 2]


def test_a_class_outside_the_tree_of_the_same_name_is_no_plait_error() -> None:
    assert type(Failure(0, "annotations", "", "", 0.0).as_error()) is errors.RankFailed


def test_a_silent_death_names_the_signal_or_the_exit_code() -> None:
    assert "rank 1 was killed by SIGKILL" in str(died_silently(1, -signal.SIGKILL))
    assert "dmesg" not in str(died_silently(1, -signal.SIGSEGV))
    assert "exit code 3" in str(died_silently(0, 3))
    assert "signal 99" in str(died_silently(0, -99))
