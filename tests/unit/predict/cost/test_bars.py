"""Error bars: they hold the number, widen with what is unknown, and agree with the probability."""

from __future__ import annotations

import pytest

import plait
from plait.errors import ConfigError
from plait.predict.cost import bars

CONFIG = {
    "model": {
        "name": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "data": {"name": "random", "seq_len": 8192},
    "train": {"global_batch": 64},
}
PLAN = "dp8:zero3 mb8 remat:full precision:bf16"


@pytest.mark.parametrize("framework", ["plait", "torchtitan"])
@pytest.mark.parametrize("cluster", ["h100x8", "l40sx8"])
def test_bars_hold_the_number_and_agree_with_fits(framework: str, cluster: str) -> None:
    data = plait.estimate(CONFIG, PLAN, cluster, framework=framework).as_dict()
    low, high = data["bars"]["step_seconds"]
    assert low <= data["step_seconds"] <= high
    assert low < high
    low, high = data["bars"]["memory_total"]
    assert low <= data["memory"]["total"] <= high
    probability = data["fits_probability"]
    assert 0 <= probability <= 1
    if data["memory_limit"] >= high:
        assert probability >= 0.95
    if data["memory_limit"] < low:
        assert probability <= 0.05 and not data["fits"]


def test_probability_rises_with_the_limit() -> None:
    values = [bars.probability_below(limit, 100.0, "one node") for limit in range(1, 400, 5)]
    assert values == sorted(values)
    assert values[0] == 0.0
    assert values[-1] == 1.0


@pytest.mark.parametrize("place", ["one node", "several nodes", "large"])
def test_a_share_is_the_inverse_of_the_probability(place: str) -> None:
    share = bars.share_for(0.1, place)
    if share < 1.0:
        probability = bars.probability_below(1.0, share, place)
        assert probability >= 0.9 - 1e-9


def test_less_risk_asks_for_a_larger_margin() -> None:
    def fullest(risk: float | None) -> float:
        best = plait.choose(CONFIG, "h100x8", risk=risk)
        assert all(one.fits_probability >= 1 - (risk or 1) - 1e-9 for one in best)
        return max(one.memory.total / one.memory_limit for one in best)

    assert fullest(0.05) <= fullest(0.4) <= 1.0
    assert fullest(None) <= 1.0


def test_the_order_of_plans_is_surer_the_farther_they_are_apart() -> None:
    sure = [bars.order_probability(ratio) for ratio in (1.0, 1.03, 1.07, 1.15, 1.3, 4.0)]
    assert sure == sorted(sure)
    assert 0.5 <= sure[0] < 0.65 and sure[-1] > 0.95


@pytest.mark.parametrize("risk", [0.0, 1.0, -3.0, float("nan")])
def test_a_risk_is_a_probability(risk: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        plait.choose(CONFIG, "h100x8", risk=risk)
