"""The folder of a run is removed while the run goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.launcher.failure import died_silently
from tests.cli.command import CONFIG, plait, write_config

DATA = CONFIG.replace(
    'name = "random"\nseq_len = 8', 'python = "tests.fault.test_removed_folder:data"'
)
ROOT = Path(__file__).parents[2]


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Tokens whose 17th reading, in the third step, removes the folder of the run."""

    def __init__(self) -> None:
        self._left = 17

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._left -= 1
        if not self._left:
            shutil.rmtree(os.environ["REMOVED"])
        tokens = (torch.arange(9) + index) % 64
        return tokens[:-1], tokens[1:]


def data() -> Tokens:
    """The data set of the run."""
    return Tokens()


@pytest.mark.slow
def test_what_was_asked_for_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("REMOVED", str(run))
    write_config(tmp_path, DATA.replace("steps = 3", "steps = 5"))
    done = plait("train", "tiny.toml", "--plan", "dp1", "--out", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "metrics.jsonl was removed while the run went on" in done.err
    names = {path.name for path in run.iterdir()}
    assert {"config.toml", "plan.txt", "products.json", "checkpoints", "summary.json"} <= names


@pytest.mark.quick
def test_a_rank_without_room_for_its_files_is_told_of_the_disk() -> None:
    assert "the disk of the run, or /dev/shm, is full or read-only" in str(died_silently(1, -7))
