"""A log has what went to the terminal, and the error that ended it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plait.errors import RunError
from plait.run.logs import AGAIN, logged, terminal_of


def test_a_log_has_both_streams_and_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs" / "rank-0.txt"
    with pytest.raises(ValueError, match="end"), logged(path):
        print("out")
        print("err", file=sys.stderr)
        assert path.read_text() == "out\nerr\n"
        assert terminal_of(sys.stderr) is sys.stderr
        raise ValueError("the end")
    assert path.read_text().endswith("ValueError: the end\n")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("out\n", "err\n")


def test_a_full_disk_hides_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank-0.txt"
    path.symlink_to("/dev/full")
    with pytest.raises(ValueError, match="why it ended"), logged(path):
        print("said", flush=True)
        raise ValueError("why it ended")
    assert capsys.readouterr().out == "said\n"


def test_a_log_without_a_place_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with (
        pytest.raises(RunError, match=r"rank-0\.txt cannot be written: "),
        logged(tmp_path / "logs" / "rank-0.txt"),
    ):
        pass


def test_a_second_start_is_marked(tmp_path: Path) -> None:
    for _ in range(2):
        with logged(tmp_path / "rank-0.txt"):
            print("said")
    assert (tmp_path / "rank-0.txt").read_text() == f"said\n\n{AGAIN}\nsaid\n"
