"""Cutting a model into stages."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.predict.cost import describe
from plait.predict.cost.time.stages import _balanced_ends, _filled_ends, layer_shares, split_model
from tests.unit.predict.cost.shapes import GPT


def dearest(costs, ends):
    return max(sum(costs[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=3, max_size=9), st.integers(2, 4))
def test_the_dearest_stage_is_as_cheap_as_can_be(costs, stages):
    if stages > len(costs):
        return
    costs = [float(cost) for cost in costs]
    ends = _balanced_ends(costs, stages)
    assert ends[-1] == len(costs) and ends == sorted(set(ends))
    best = min(
        dearest(costs, [*cut, len(costs)]) for cut in combinations(range(1, len(costs)), stages - 1)
    )
    assert dearest(costs, ends) == pytest.approx(best)


def test_every_block_is_in_one_stage_in_order():
    model = describe(GPT, 128)
    for cut in ("cost", "layers", "filled"):
        stages = split_model(model, 4, cut)
        assert [b.name for s in stages for b, n in s.runs for _ in range(n)] == [
            b.name for b in model.blocks()
        ]
        assert stages[0].first and stages[-1].last
        assert sum(stage.parameters for stage in stages) == model.parameters


def test_a_large_head_leaves_its_stage_fewer_layers():
    model = describe({**GPT, "vocab_size": 65536}, 128)
    layers = [sum(n for b, n in s.runs if b.name == "layer") for s in split_model(model, 4)]
    assert layers[-1] < layers[0]


def test_even_shares_put_the_rest_between_the_ends():
    assert layer_shares(22, 8) == (2, 3, 3, 3, 3, 3, 3, 2)


def test_more_stages_than_blocks():
    with pytest.raises(
        PlanError, match="16 pipeline stages need 16 blocks or more, and gpt has 10"
    ):
        split_model(describe(GPT, 128), 16)


def test_a_filled_stage_takes_the_block_that_passes_its_share():
    """Llama of 16 layers whose head counts as four of them, as nanotron cuts it into four."""
    products = [0.0, *[1.0] * 16, 4.0]
    ends = _filled_ends(products, 4)
    assert [end - start for start, end in zip([0, *ends], ends, strict=False)] == [7, 5, 5, 1]


def test_a_filled_model_leaves_each_stage_a_block():
    ends = _filled_ends([0.0, 1.0, 1.0, 9.0], 4)
    assert ends == [1, 2, 3, 4]
