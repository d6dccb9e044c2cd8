"""A budget: how many devices train so many tokens within days, or within money.

Numbers of devices are doubled. Then the gap between the last that is too slow and the first that is
not is halved. The answer is the fewest devices within the days. Where no days are given it is the
fastest run within the money. The cheapest run of all can be asked for instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from plait.cluster import Cluster
from plait.errors import ConfigError
from plait.predict.cost.api import cluster_of, job_of
from plait.predict.cost.campaign import DAY, campaign, check_tokens
from plait.predict.cost.frameworks import Framework, framework_of
from plait.predict.cost.model.tables import config_tables
from plait.predict.cost.records import Estimate
from plait.predict.planner.choose import Choice, NothingFits, decide
from plait.values import JsonMapping, JsonObject

PARTS: Final = 16
"""The fewest devices are found to one part in so many."""
DEAR: Final = 1.25
"""Runs that cost so many times the cheapest end the search for it."""


@dataclass(frozen=True)
class Budget:
    """Tokens of the run, and the most days and US dollars that it may take; None is any."""

    tokens: float
    days: float | None = None
    dollars: float | None = None
    mtbf_hours: float | None = None

    def __post_init__(self) -> None:
        check_tokens(self.tokens)
        for name, value, example in (("days", self.days, "30"), ("dollars", self.dollars, "1e6")):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} = {value:g}: a budget has more than none, as {example}")
        if self.days is None and self.dollars is None:
            raise ConfigError("a budget has days, dollars, or both")

    def holds(self, days: float, dollars: float) -> bool:
        """Whether a run is within it."""
        return days <= (self.days or math.inf) and dollars <= (self.dollars or math.inf)


@dataclass(frozen=True)
class Offer:
    """One number of devices: its choice and the whole run, or the reason for which nothing fits."""

    num_devices: int
    choice: Choice | None
    run: JsonObject
    within: bool
    reason: str = ""

    @property
    def days(self) -> float:
        """Days of the run; infinite where nothing fits."""
        return float(self.run.get("days", math.inf))

    @property
    def dollars(self) -> float:
        """Price of the run; infinite where nothing fits."""
        return float(self.run.get("price", math.inf))

    @property
    def best(self) -> Estimate | None:
        """The best plan."""
        return self.choice.plans[0] if self.choice else None

    def as_dict(self) -> JsonObject:
        """One row of the answer."""
        return {
            "num_devices": self.num_devices,
            "plan": str(self.best.plan) if self.best else None,
            "days": self.run.get("days"),
            "price": self.run.get("price"),
            "within": self.within,
        }


@dataclass
class BudgetSearch:
    """The search over numbers of devices up to those of the cluster."""

    budget: Budget
    ask: Callable[[int], Offer]
    """The offer of so many devices."""
    most: int
    node: int
    cheapest: bool = False
    """Whether the cheapest within the budget is wanted, and not the fewest devices."""
    tried: dict[int, Offer] = field(default_factory=dict)

    def best(self, fewest: int = 1) -> Offer | None:
        """The offer that is wanted, None where none is within; no fewer devices than `fewest`."""
        sizes = [size for size in doublings(self.most) if size >= fewest]
        for size in sizes:
            offer = self._offer(size)
            if offer.within and self.budget.days is not None and not self.cheapest:
                break
            if self._is_dear(offer):
                break
        self._refine()
        return self._chosen()

    def _is_dear(self, offer: Offer) -> bool:
        """Whether more devices will only make the run dearer than it may be, or than it need be."""
        half = self.tried.get(offer.num_devices // 2)
        if offer.choice is None or half is None or offer.dollars < half.dollars:
            return False
        chosen = self._chosen()
        limit = self.budget.dollars or math.inf
        if self.cheapest and chosen is not None:
            limit = min(limit, DEAR * chosen.dollars)
        return offer.dollars > limit

    def _offer(self, size: int) -> Offer:
        if size not in self.tried:
            self.tried[size] = self.ask(size)
        return self.tried[size]

    def _refine(self) -> None:
        """Halve the gap beside the chosen size, in whole nodes."""
        for _ in range(PARTS.bit_length() - 1):
            chosen = self._chosen()
            if chosen is None:
                return
            faster = self.budget.days is None and not self.cheapest
            others = [size for size in self.tried if (size > chosen.num_devices) == faster]
            others = [size for size in others if size != chosen.num_devices]
            if not others:
                return
            other = min(others) if faster else max(others)
            low, high = sorted((other, chosen.num_devices))
            unit = self.node if high > self.node else 1
            middle = -(-(low + high) // 2 // unit) * unit
            if middle in {low, high} or high - low <= high // PARTS:
                return
            self._offer(middle)

    def _chosen(self) -> Offer | None:
        within = [offer for offer in self.tried.values() if offer.within]
        if self.cheapest:
            return min(within, key=lambda one: (one.dollars, one.days), default=None)
        if self.budget.days is None:
            return min(within, key=lambda one: one.days, default=None)
        return min(within, key=lambda one: one.num_devices, default=None)


def doublings(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself.

    >>> doublings(12)
    [1, 2, 4, 8, 12]
    """
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return sizes if sizes[-1] == most else [*sizes, most]


def within_budget(
    config: JsonMapping | str | Path,
    cluster: Cluster | str | None,
    budget: Budget,
    *,
    cheapest: bool = False,
    framework: Framework | str = "plait",
    risk: float | None = None,
    fix: str = "",
) -> tuple[Offer | None, list[Offer]]:
    """The offer within the budget, None where there is none, and all that were looked at.

    Devices are those of `cluster` at most. `cheapest` asks for the cheapest run.
    """
    tables = config_tables(config)
    whole = cluster_of(tables, cluster)

    def ask(size: int) -> Offer:
        machines = whole.with_num_devices(size)
        try:
            choice = decide(tables, machines, framework=framework, risk=risk, fix=fix)
        except NothingFits as reason:
            return Offer(size, None, {}, False, str(reason))
        run = campaign(choice.plans[0], budget.tokens, budget.mtbf_hours)
        return Offer(size, choice, run, budget.holds(run["days"], run["price"]))

    node = whole.node.devices
    search = BudgetSearch(budget, ask, whole.num_devices, node, cheapest)
    best = search.best(_fewest(tables, whole, budget, framework))
    return best, [search.tried[size] for size in sorted(search.tried)]


def _fewest(
    tables: JsonMapping, cluster: Cluster, budget: Budget, framework: Framework | str
) -> int:
    """The devices below which the peak rate alone takes too many days."""
    if budget.days is None:
        return 1
    job = job_of(tables, None, framework_of(framework), num_devices=cluster.num_devices)
    flops = 3.0 * job.model.forward_flops / job.model.seq_len * budget.tokens
    rate = max(cluster.device.flops.values())
    return min(cluster.num_devices, max(1, math.floor(flops / rate / (budget.days * DAY))))
