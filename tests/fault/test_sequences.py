"""A sample of `tests.fault.sequences`: whatever happens to a run, each sample is read once and in
the order of a run that nobody disturbs.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.fault.reading import LIBRARY, SOURCES
from tests.fault.sequences import Judge, Sequence, Stretch

MOVED = (
    Stretch("dp2", 1, 2, (0, 1), 0.01),
    Stretch("dp3:ring", 0, 1, (2,)),
    Stretch("dp1", 2, 3),
    Stretch("tp2", 1, None),
)

needs_library = pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("sequences"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [*SOURCES, *(pytest.param(one, marks=needs_library) for one in LIBRARY)]
)
def test_ranks_that_are_killed_and_moved_read_each_sample_once(source: str, judge: Judge) -> None:
    assert judge.judge(Sequence(0, source, 2, MOVED, trains=False)) == []


@pytest.mark.slow
def test_a_run_that_is_killed_and_moved_trains_on_each_sample_once(judge: Judge) -> None:
    assert judge.judge(Sequence(1, "mixture", 2, MOVED, trains=True)) == []


@pytest.mark.slow
@needs_library
def test_an_iterable_of_the_library_is_trained_on_once_by_ranks_that_are_killed(
    judge: Judge,
) -> None:
    assert judge.judge(Sequence(2, "iterable", 2, MOVED, trains=True)) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_random_sequences_of_events(seed: int, judge: Judge) -> None:
    assert judge.judge(Sequence.draw(seed)) == []
