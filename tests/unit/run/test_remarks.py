"""Settings that do less than they say are named before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.config import Config
from plait.datasets import Loader
from plait.plan import Plan
from plait.run.hooks import RunStart
from plait.run.job import TrainingRun, run
from plait.run.remarks import Remarks

MODEL = {
    "name": "mlp",
    "in_features": 64,
    "hidden_size": 2,
    "num_hidden_layers": 1,
    "out_features": 10,
}


class Samples:
    """Five samples; those of a mixture are drawn without end."""

    def __init__(self, draws: bool = False) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index


def config(global_batch: int) -> Config:
    train = {"global_batch": global_batch, "steps": 2}
    return Config.load({"model": MODEL, "data": {"name": "digits"}, "train": train})


def said(global_batch: int, samples: Any, last_step: int = 1) -> list[str]:
    sentences: list[str] = []
    world = SimpleNamespace(device=torch.device("cpu"))
    engine: Any = SimpleNamespace(plan=Plan.parse("dp1"), world=world)
    start = RunStart(engine, Loader(samples, global_batch), 1, last_step)
    Remarks(global_batch, sentences.append).on_start(start)
    return sentences


def test_a_batch_above_the_data_set_is_named_with_both_numbers() -> None:
    (sentence,) = said(99999999999999, Samples())
    assert "global_batch 99999999999999 is more than the 5 samples" in sentence
    assert "to 5 or less" in sentence


def test_a_run_with_no_step_left_says_nothing() -> None:
    assert said(9, Samples(), last_step=0) == []


@pytest.mark.parametrize(("size", "draws"), [(5, False), (1, False), (6, True)])
def test_a_batch_that_the_data_can_fill_is_not_spoken_of(size: int, draws: bool) -> None:
    assert said(size, Samples(draws)) == []


def test_a_run_says_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    run(TrainingRun(config(10_000), "dp1"))
    assert capsys.readouterr().err.count("train.global_batch 10000 is more than the") == 1
