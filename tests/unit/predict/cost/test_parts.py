"""Each part of the model against measurements of that part alone."""

import pytest
from benchmarks.planner.parts import medians

LARGEST = {
    "collectives, large": 0.15,
    "collectives, small": 0.15,
    "products, large": 0.06,
    "products, small": 0.06,
    "attention, long": 0.06,
    "attention, short": 0.10,
}


@pytest.fixture(scope="module")
def found():
    return medians()


@pytest.mark.parametrize("part", LARGEST)
def test_a_part_is_right_by_itself(found, part):
    count, _, size = found[part]
    assert count > 100
    assert size <= LARGEST[part]
