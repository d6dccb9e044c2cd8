"""A first rank that judges for long, and what `make()` must give."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from plait.comm import World
from plait.comm.simulated import simulate
from plait.errors import ConfigError, RunError
from plait.mesh import Mesh
from plait.verify import Report, waiting
from plait.verify.outside import trial
from plait.verify.outside.alike import check_values, differently_made, marks_of
from plait.verify.outside.task import Made
from plait.verify.ranks import by_first

EQUAL = Report([], [], [], 1e-10, 1)


def judged_for_long() -> Report:
    time.sleep(3)
    return EQUAL


def refused() -> Report:
    raise ValueError("broken here")


def on_ranks(world: World) -> Report:
    return trial._by_first(world, judged_for_long)


def failing(world: World) -> Report:
    return trial._by_first(world, refused)


def of_a_plan(world: World) -> Report:
    return by_first(world, judged_for_long)


@pytest.mark.parametrize("waits", [on_ranks, of_a_plan])
def test_the_others_are_told_while_the_first_rank_works(
    monkeypatch: pytest.MonkeyPatch, waits: Callable[[World], Report]
) -> None:
    monkeypatch.setattr(waiting, "TELL_SECONDS", 0.1)
    reports = simulate(Mesh(dp=2), waits, timeout_seconds=2)
    assert [report.ok for report in reports] == [True, True]


def test_every_rank_raises_what_the_first_did() -> None:
    with pytest.raises(RunError, match="broken here"):
        simulate(Mesh(dp=2), failing)


def made(seed: int) -> Made:
    torch.manual_seed(seed)
    return Made(nn.Linear(3, 2), [(torch.zeros(2, 3), torch.zeros(2))], None)


def test_a_model_of_each_rank_is_named() -> None:
    assert not differently_made([marks_of(made(0)), marks_of(made(0))])
    (found,) = differently_made([marks_of(made(0)), marks_of(made(1)), marks_of(made(0))])
    assert found.cause == "make" and "rank 1 other values of the model" in found.text


def test_batches_of_each_rank_are_named() -> None:
    model = nn.Linear(3, 2)
    marks = [marks_of(Made(model, [(torch.full((2, 3), one),)], None)) for one in (0.0, 1.0)]
    assert "rank 1 other batches" in differently_made(marks)[0].text


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="'weight' is on the meta device"):
        check_values(nn.Linear(3, 2, device="meta"))
