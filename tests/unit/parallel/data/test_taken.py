"""Parameters that code takes by hand: who is told of it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from plait.parallel.data.sharded_unit import tell_taken
from plait.parallel.data.strategy import RunningForward


def test_all_stages_of_an_engine_are_told_and_an_earlier_engine_is_not() -> None:
    module = nn.Linear(2, 2)
    told: list[str] = []

    def listener(name: str) -> Callable[[Tensor], None]:
        def taken(param: Tensor) -> None:
            told.append(name)

        return taken

    earlier, engine = RunningForward(), RunningForward()
    tell_taken(module, earlier, listener("earlier"))
    for name in ("first stage", "second stage"):
        tell_taken(module, engine, listener(name))
    assert module.weight.shape == (2, 2)
    assert told == ["first stage", "second stage"]


def test_an_engine_whose_forward_broke_says_nothing_of_the_next() -> None:
    broken = RunningForward()
    broken.begin()
    assert not RunningForward().is_under_way
