"""A budget: the fewest devices within days, the fastest run within money, the cheapest of all."""

import json

import pytest

from plait.cli import main
from plait.errors import ConfigError
from plait.predict.planner.budget import Budget, BudgetSearch, Offer, doublings, within_budget
from tests.unit.predict.planner.test_sweep import CONFIG, answer


def offers(seconds_of, price_of=lambda size, days: size * days):
    """Offers whose days are a function of the devices; every one of them is counted."""
    asked = []

    def ask(size, budget):
        asked.append(size)
        days = seconds_of(size)
        dollars = price_of(size, days)
        run = {"days": days, "price": dollars}
        return Offer(size, object(), run, budget.holds(days, dollars))

    return asked, ask


def searched(budget, most, ask, *, cheapest=False, node=8, fewest=1):
    search = BudgetSearch(budget, lambda size: ask(size, budget), most, node, cheapest)
    return search.best(fewest)


def test_the_fewest_devices_are_found_in_whole_nodes():
    asked, ask = offers(lambda size: 1000 / size)
    best = searched(Budget(1.0, days=6.5), 4096, ask)
    assert best.num_devices == 160  # 153.8 of them would do; 1000 / 152 is too slow
    assert len(asked) < 15 and max(asked) == 256


def test_no_device_count_below_the_floor_is_asked_for():
    asked, ask = offers(lambda size: 1000 / size)
    searched(Budget(1.0, days=6.5), 4096, ask, fewest=100)
    assert min(asked) >= 100


def test_the_fastest_run_within_the_money():
    # Twice the devices are 1.6 times as fast, so that more of them cost more.
    asked, ask = offers(lambda size: 1000 / size**0.678, lambda size, days: size * days)
    best = searched(Budget(1.0, dollars=5000.0), 1 << 20, ask)
    assert best.dollars <= 5000.0
    assert best.num_devices == pytest.approx(5.0 ** (1 / 0.322), rel=1 / 12)
    assert max(asked) <= 1024


def test_the_cheapest_within_both():
    price = {1: 9.0, 2: 8.0, 4: 7.0, 8: 7.5, 16: 12.0}
    _, ask = offers(lambda size: 64 / size, lambda size, _: price.get(size, 99.0))
    assert searched(Budget(1.0, days=64.0), 16, ask, cheapest=True).num_devices == 4
    assert searched(Budget(1.0, days=8.0), 16, ask, cheapest=True).num_devices == 8
    assert searched(Budget(1.0, days=8.0, dollars=7.0), 16, ask, cheapest=True) is None


def test_doublings_end_with_all():
    assert doublings(1) == [1] and doublings(24) == [1, 2, 4, 8, 16, 24]


def test_a_real_search_is_within_and_half_of_its_devices_are_not():
    budget = Budget(1e10, days=2.0)
    best, tried = within_budget(CONFIG, "a100-80gbx256", budget)
    assert best is not None and best.days <= 2.0
    assert all(one.days > 2.0 for one in tried if one.num_devices <= best.num_devices / 2)


@pytest.mark.parametrize("limits", [{}, {"days": 0.0}, {"dollars": -1.0}, {"days": float("nan")}])
def test_budgets_that_cannot_be(limits):
    with pytest.raises(ConfigError):
        Budget(1e9, **limits)
    with pytest.raises(ConfigError, match=r"1e\+18 at most"):
        Budget(1e300, days=1.0)


def test_the_verb_plans_for_the_devices_that_it_chose(capsys, path):
    asked = ("plan", path, "--cluster", "a100-80gbx64", "--tokens", "1e10")
    code, data = answer(capsys, *asked, "--days", "3")
    assert code == 0 and data["num_devices"] == data["budget"]["num_devices"]
    assert data["plans"][0]["days"] <= 3
    code, data = answer(capsys, *asked, "--days", "0.001")
    assert code == 1 and "the fastest run takes" in data["reason"] and data["plans"] == []
    assert "of the numbers that were looked at (" in data["reason"]
    code, data = answer(capsys, *asked, "--dollars", "1")
    assert code == 1 and data["reason"].endswith("; more dollars")
    code, data = answer(capsys, *asked, "--dollars", "0.004")
    assert code == 1 and "in 0.004 USD:" in data["reason"]
    code, data = answer(capsys, *asked, "--days", "3", "--mtbf", "0.0001")
    assert code == 1 and "no useful work remains" in data["reason"] and "inf" not in data["reason"]
    code, data = answer(capsys, "plan", path, "--cluster", "h100", "--days", "3")
    assert code == 2 and "--tokens" in data["error"]
    code = main([*asked, "--dollars", "1000"])
    assert code == 0 and "looked at" in capsys.readouterr().out
    assert json.dumps(data)
