"""`plait.search`: everything that a search found, as one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plait.cluster import Cluster
from plait.cluster.mixed import MixedCluster
from plait.errors import ClusterError
from plait.predict.cost.api import cluster_name
from plait.predict.cost.frameworks import Framework
from plait.predict.cost.model.tables import config_tables
from plait.predict.cost.records import Estimate
from plait.predict.planner.choose import check_top, decide
from plait.predict.planner.explain import explain
from plait.predict.planner.pareto import pareto_front
from plait.values import JsonObject


@dataclass(frozen=True)
class SearchStatistics:
    """Counts of a search. `combinations` are ways to split the devices, `not_opened` those that a
    bound ruled out.
    """

    combinations: int
    plans: int
    too_large: int
    not_opened: int

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class SearchResult:
    """Plans best first, those that no other beats in everything, why others lost, and counts."""

    plans: list[Estimate]
    pareto: list[Estimate]
    explanation: list[str]
    statistics: SearchStatistics

    def as_dict(self) -> JsonObject:
        """The keys of `plait plan --json`."""
        return {
            "plans": [one.as_dict() for one in self.plans],
            "pareto": [str(one.plan) for one in self.pareto],
            "explanation": list(self.explanation),
            "searched": self.statistics.as_dict(),
        }


def search(
    config: Mapping[str, object] | str | Path,
    cluster: Cluster | str | None = None,
    *,
    objective: str = "time",
    top: int = 10,
    runnable: bool = False,
    framework: Framework | str = "plait",
    risk: float | None = None,
    fix: str = "",
) -> SearchResult:
    """The best plans with all that the search saw; arguments and errors are those of
    `plait.choose`. Raises `ClusterError` for several kinds of device.
    """
    check_top(top)
    tables = config_tables(config)
    asked = cluster or cluster_name(tables)
    if MixedCluster.is_mixed(asked):
        raise ClusterError(
            f"{asked} has several kinds of device, which plait.search does not explain; take "
            "plait.choose"
        )
    choice = decide(
        tables,
        cluster,
        objective=objective,
        runnable=runnable,
        framework=framework,
        risk=risk,
        fix=fix,
    )
    found = choice.found
    counts = SearchStatistics(
        found.num_degrees, found.num_guesses, len(found.too_large), found.not_opened
    )
    return SearchResult(choice.plans[:top], pareto_front(choice.plans), explain(choice), counts)
