"""The states of a ZeRO-3 unit: the arrows are those that `UnitState` draws, and memory follows."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from plait.parallel.data.sharded_unit import ShardedUnit, UnitState

VERBS = ("prefetch", "unshard", "rest", "take", "reshard", "release")
ARROW = re.compile(r"^\s+(\w+)\s+([A-Z]+(?: or [A-Z]+)*) -> ([A-Z]+)$", re.MULTILINE)


class Recorded:
    """A bucket that writes down what is done with its memory."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.done.append(name)


def arrows() -> dict[tuple[str, UnitState], UnitState]:
    """(verb, state) -> state, as the docstring draws them."""
    assert UnitState.__doc__
    return {
        (verb, UnitState[source]): UnitState[target]
        for verb, sources, target in ARROW.findall(UnitState.__doc__)
        for source in sources.split(" or ")
    }


def unit_in(state: UnitState) -> tuple[ShardedUnit, Recorded]:
    bucket = Recorded()
    unit: Any = SimpleNamespace(frozen=())
    buckets: Any = [bucket]
    sharded = ShardedUnit(unit, 0, buckets)
    way = {
        UnitState.SHARDED: (),
        UnitState.GATHERING: ("prefetch",),
        UnitState.WHOLE: ("unshard",),
        UnitState.RESTING: ("unshard", "rest"),
        UnitState.TAKEN: ("take",),
    }
    for verb in way[state]:
        getattr(sharded, verb)()
    assert sharded.state is state
    bucket.done.clear()
    return sharded, bucket


@pytest.mark.parametrize(("verb", "state"), [*product(VERBS, UnitState)])
def test_every_arrow_is_drawn(verb: str, state: UnitState) -> None:
    drawn = arrows()
    assert {name for name, _ in drawn} == set(VERBS)
    unit, _ = unit_in(state)
    getattr(unit, verb)()
    assert unit.state is drawn.get((verb, state), state)


@pytest.mark.parametrize(("verb", "state"), [*product(VERBS, UnitState)])
def test_memory_follows_the_state(verb: str, state: UnitState) -> None:
    unit, bucket = unit_in(state)
    getattr(unit, verb)()
    had_bytes, has_bytes = state is not UnitState.SHARDED, unit.state is not UnitState.SHARDED
    assert bucket.done.count("gather") == int(has_bytes and not had_bytes)
    assert bucket.done.count("free") == int(had_bytes and not has_bytes)
    was_filling = state is UnitState.GATHERING or "gather" in bucket.done
    assert ("wait" in bucket.done) == (was_filling and unit.state is not UnitState.GATHERING)


def test_a_gather_that_nothing_used_is_waited_for_before_the_memory_goes() -> None:
    unit, bucket = unit_in(UnitState.GATHERING)
    unit.reshard()
    assert bucket.done == ["wait", "free"]
