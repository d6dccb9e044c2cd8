"""Errors of a user's own functions become one sentence with the line of the file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.errors import ConfigError, PlaitError, RankFailed
from plait.verify.outside.failing import in_words
from plait.verify.outside.source import parse


def raising(error: BaseException) -> Callable[[], None]:
    def step() -> None:
        raise error

    return step


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("my own error\nsecond line"), "ValueError: my own error"),
        (KeyError("data.txt"), "KeyError: 'data.txt'"),
        (SystemExit(), "SystemExit"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_an_error_is_one_sentence_with_its_place(error: BaseException, words: str) -> None:
    with pytest.raises(RankFailed) as seen, in_words("the step", __file__, RankFailed):
        raising(error)()
    text = str(seen.value)
    assert text.startswith("the step failed on rank 0 at test_step_errors.py:18: ")
    assert text.endswith(words) and "\n" not in text


def test_a_lost_rank_is_told() -> None:
    error = RuntimeError("[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    told = pytest.raises(RankFailed, match=r"rank 0 lost another rank in the step at test_step_")
    with told, in_words("the step", __file__, RankFailed):
        raising(error)()


def test_errors_of_plait_stay_as_they_are() -> None:
    with pytest.raises(PlaitError, match=r"^as it was$"), in_words("make()", "", RankFailed):
        raising(ConfigError("as it was"))()


def test_functions_that_are_imported_with_a_star_are_there(tmp_path: Path) -> None:
    path = tmp_path / "steps_with_star.py"
    path.write_text("from parts import *\n")
    (tmp_path / "parts.py").write_text(
        "def make():\n    return 1\ndef train_step(model, batch, loss):\n    pass\n"
    )
    try:
        assert set(parse(str(path)).functions()) == {"make", "train_step"}
    finally:
        sys.path.remove(str(tmp_path))
