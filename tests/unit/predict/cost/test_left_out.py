"""Leave-one-source-out: a fit finds the constants of its sources, and ignores the one left out."""

import math

from benchmarks.planner.left_out import Effects, fit, middle, sample, untold
from benchmarks.planner.rows import cases

FREE = {"rate": (0.5, 0.8, 1.0, 1.25), "wait": (0.0, 1.0, 2.0)}


def effects(truth: dict[str, float]) -> Effects:
    """Three sources of four rows; the last is off by a factor that no constant explains."""
    centre = middle(FREE)
    sources = ("a",) * 4 + ("b",) * 4 + ("odd",) * 4
    off = (0.0,) * 8 + (2.0,) * 4
    weight = {"rate": 1.0, "wait": 0.1}

    def log(name: str, value: float) -> float:
        return weight[name] * (math.log(value) if name == "rate" else value)

    start = sum(log(name, centre[name]) - log(name, value) for name, value in truth.items())
    moves = {
        (name, value): tuple(log(name, value) - log(name, centre[name]) for _ in sources)
        for name, values in FREE.items()
        for value in values
    }
    return Effects(sources, tuple(start + one for one in off), moves)


def test_a_fit_finds_the_constants_of_its_sources():
    truth = {"rate": 0.8, "wait": 2.0}
    found = effects(truth)
    assert fit(found, FREE, "odd") == truth
    assert found.loss(truth, "odd") < 1e-9 < found.loss(truth)


def test_each_source_has_one_vote():
    rows = [case for case in cases()[0] if case.seconds]
    few = sample(rows, 5)
    assert {case.source for case in few} == {case.source for case in rows}
    assert max(sum(case.source == one.source for case in few) for one in few) == 5


def test_a_constant_of_one_framework_is_unknown_without_its_only_source():
    rows = sample([case for case in cases()[0] if case.seconds], 3)
    assert untold(rows, "09d") == {"skew_seconds": 0.0}
    assert untold(rows, "09g") == {}  # 09g2 is of the same framework
