"""A whole run: days, money, energy, and the useful part of the time when devices fail."""

from __future__ import annotations

import math

import pytest

import plait
from plait.cli.estimate import campaign_lines
from plait.errors import ConfigError
from plait.predict.cost.campaign import (
    KeepingRates,
    MeasuredCosts,
    best_interval,
    campaign,
    useful_fraction,
)
from tests.unit.predict.cost.shapes import LLAMA_8B, config

GUESS = plait.estimate(
    config(LLAMA_8B, seq_len=8192, global_batch=128), "dp16:zero3 mb8 remat:full", "h100x16"
)


def test_days_money_and_energy_follow_from_the_step() -> None:
    found = campaign(GUESS, tokens=1e12)
    assert found["steps"] == math.ceil(1e12 / (128 * 8192))
    assert found["days"] == pytest.approx(found["steps"] * GUESS.step_seconds / 86400)
    assert found["device_hours"] == pytest.approx(found["days"] * 24 * 16)
    assert found["price"] == pytest.approx(found["device_hours"] * GUESS.price_per_hour)
    assert found["energy_kwh"] == pytest.approx(found["device_hours"] * 0.7)
    low, high = found["days_bar"]
    assert low <= found["days"] <= high
    assert campaign(GUESS) == {}


def test_an_estimate_prints_as_one_line() -> None:
    assert len(str(GUESS)) < 120 and repr(GUESS) == f"<Estimate {GUESS}>"


def test_a_board_of_unknown_power_has_no_energy() -> None:
    guess = plait.estimate(config(LLAMA_8B), "dp8:zero3", "trainium2x8")
    assert campaign(guess, tokens=1e9)["energy_kwh"] is None


def test_the_best_interval_is_the_best_of_all_intervals() -> None:
    for seconds, failure in ((5.0, 3600.0), (300.0, 6 * 3600.0), (60.0, 1800.0)):
        best = best_interval(seconds, failure)
        reached = useful_fraction(best, seconds, 600.0, failure)
        others = (best * 1.05**power for power in range(-40, 41))
        assert reached >= max(useful_fraction(t, seconds, 600.0, failure) for t in others) - 1e-4


def test_the_paper_s_own_examples() -> None:
    # Daly 2006, figures 3 to 5: 117, 57 and 9.1 minutes for five minutes a dump.
    for hours, minutes in ((24.0, 117.0), (6.0, 57.0), (0.25, 9.1)):
        assert best_interval(300.0, hours * 3600) / 60 == pytest.approx(minutes, rel=0.02)


def test_llama_3_s_failures_leave_more_than_nine_tenths() -> None:
    """466 interruptions in 54 days of 16,384 devices; "higher than 90%" of the time was useful."""
    guess = plait.estimate(
        config({**LLAMA_8B, "num_hidden_layers": 126, "hidden_size": 16384,
                "num_attention_heads": 128, "intermediate_size": 53248},
               seq_len=8192, global_batch=2048),
        "tp8:1d,sp pp16:interleaved,v2 dp128:zero1 mb16 precision:bf16",
        "h100x16384",
    )  # fmt: skip
    found = campaign(guess, mtbf_hours=54 * 24 * 16384 / 466)["goodput"]
    assert found["failures_per_day"] == pytest.approx(466 / 54)
    assert 0.9 < found["checkpoints"]["useful_fraction"] < 0.97
    assert found["useful_fraction"] == found["snapshots"]["useful_fraction"] > 0.97
    assert found["snapshots"]["interval_seconds"] < found["checkpoints"]["interval_seconds"]


def test_failures_make_a_run_longer() -> None:
    plain = campaign(GUESS, tokens=1e12)
    failing = campaign(GUESS, tokens=1e12, mtbf_hours=1000.0)
    assert failing["days"] == pytest.approx(plain["days"] / failing["goodput"]["useful_fraction"])


SUMMARY = {
    "snapshots": {"count": 40, "seconds": 0.8},
    "checkpoints": {"count": 4, "seconds": 0.2},
    "recoveries": [
        {"source": "snapshot", "seconds": 2.0},
        {"source": "replica", "seconds": 3.0},
        {"source": "snapshot", "seconds": None},
        {"source": "snapshot", "seconds": 9.0},
        {"source": "start", "seconds": 500.0},
    ],
}


def test_what_a_run_has_measured_takes_the_place_of_what_is_assumed() -> None:
    costs = MeasuredCosts.of(SUMMARY)
    assert costs == MeasuredCosts(snapshot=0.02, checkpoint=0.05, rejoin=3.0, restart=None)
    assumed = campaign(GUESS, mtbf_hours=10.0)["goodput"]
    found = campaign(GUESS, mtbf_hours=10.0, costs=costs)["goodput"]
    assert (assumed["measured"], found["measured"]) == ([], ["snapshot", "checkpoint", "rejoin"])
    assert (found["snapshots"]["seconds"], found["snapshots"]["restart_seconds"]) == (0.02, 3.0)
    assert found["checkpoints"]["seconds"] == 0.05
    kept = "restart_seconds"  # no recovery of the run came from a checkpoint
    assert found["checkpoints"][kept] == assumed["checkpoints"][kept]
    step = GUESS.step_seconds
    steps = max(1, round(best_interval(0.02, 10.0 * 3600 / 16) / step))
    assert found["snapshots"]["interval_steps"] == steps
    assert found["useful_fraction"] == pytest.approx(
        useful_fraction(steps * step, 0.02, 3.0, 10.0 * 3600 / 16)
    )


def test_the_rates_of_a_probe_are_taken_by_the_bytes_of_a_plan() -> None:
    found = {
        "copy_bytes_per_second": 1e9,
        "write_bytes_per_second": 2e9,
    }
    rates = KeepingRates.of_probe({"keeping": found})
    assert rates is not None
    costs = rates.of_estimate(GUESS)
    assert costs.snapshot == GUESS.state_bytes / 16 / 1e9
    assert costs.checkpoint == GUESS.state_bytes / 2e9
    assert costs.names == ["snapshot", "checkpoint"]
    assert campaign(GUESS, mtbf_hours=10.0, costs=rates) == campaign(
        GUESS, mtbf_hours=10.0, costs=costs
    )
    found["recovery_seconds"] = 1.5
    rates = KeepingRates.of_probe({"keeping": found})
    assert rates is not None
    assert rates.of_estimate(GUESS).rejoin == costs.snapshot + 1.5 + GUESS.step_seconds
    assert rates.of_estimate(GUESS).names == ["snapshot", "checkpoint", "rejoin"]
    del found["write_bytes_per_second"], found["recovery_seconds"]
    some = KeepingRates.of_probe({"keeping": found})
    assert some is not None and some.of_estimate(GUESS).names == ["snapshot"]


@pytest.mark.parametrize("keeping", [None, 7, {}, {"copy_bytes_per_second": "x"}])
def test_a_probe_without_rates_has_none(keeping: object) -> None:
    assert KeepingRates.of_probe({"keeping": keeping}) is None


def test_a_run_without_snapshots_has_measured_none() -> None:
    assert MeasuredCosts.of({"snapshots": {"count": 0, "seconds": 0.0}}).names == []


@pytest.mark.parametrize(
    "numbers", [{"tokens": 0.0}, {"tokens": math.inf}, {"tokens": 1e300}, {"mtbf_hours": -1.0}]
)
def test_numbers_that_cannot_be_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"as 15e12|as 40000"):
        campaign(GUESS, **numbers)


def test_a_run_that_never_ends_is_said_in_words() -> None:
    run = campaign(GUESS, 1e12, mtbf_hours=1e-4)
    assert run["days"] == math.inf
    first = campaign_lines(run)[0]
    assert first.endswith("no useful work remains") and "inf" not in first


@pytest.mark.parametrize("hours", [1e-9, 0.0, -1.0, 1e308, math.inf, math.nan])
def test_hours_between_failures_that_no_device_has_are_refused(hours: float) -> None:
    with pytest.raises(ConfigError, match=r"fails once in 0\.0001 to 1e\+12 hours"):
        campaign(GUESS, tokens=1e9, mtbf_hours=hours)


def test_the_longest_hours_between_failures_have_an_interval() -> None:
    assert campaign(GUESS, tokens=1e9, mtbf_hours=1e12)["goodput"]["useful_fraction"] > 0.999
