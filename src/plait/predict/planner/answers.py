"""`plait.choose`: the best plans for a config, on one kind of device or on two."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plait.cluster import Cluster
from plait.cluster.mixed import MixedCluster
from plait.errors import ConfigError
from plait.predict.cost.api import cluster_name
from plait.predict.cost.frameworks import Framework
from plait.predict.cost.model.tables import config_tables
from plait.predict.cost.records import Estimate
from plait.predict.planner.choose import check_top, decide
from plait.predict.planner.mixed import check_objective, choose_mixed


def choose(
    config: Mapping[str, object] | str | Path,
    cluster: Cluster | str | None = None,
    *,
    objective: str = "time",
    top: int = 10,
    runnable: bool = False,
    framework: Framework | str = "plait",
    risk: float | None = None,
    fix: str = "",
) -> list[Estimate]:
    """The best plans for a training, best first. Pure: no process group, no tensor.

    Args:
        config: as in `plait.estimate`.
        cluster: the devices, or their name as `Cluster.parse` reads it; by default the config's.
            Two kinds are joined by +, and take only the other arguments `framework` and `top`.
        objective: "time" (seconds of a step), "cost" (price of a token) or "memory" (bytes of the
            fullest rank). "cost" may leave devices idle.
        top: how many plans to answer with.
        runnable: leave out plans that this version of plait cannot run yet.
        framework: who will run them: the choice is among what it offers, predicted as it runs.
        risk: the largest accepted probability of running out of memory. Without it plans above one
            half come only where no other fits.
        fix: parts of a plan that are decided, such as "tp8 1f1b".

    Raises:
        NothingFits: no plan fits the memory.
        ConfigError: an unknown objective, a risk that is no probability, or no plan to show. Also
            an argument of one kind of device where there are two.
    """
    check_top(top)
    tables = config_tables(config)
    asked = cluster or cluster_name(tables)
    if isinstance(asked, str) and MixedCluster.is_mixed(asked):
        check_objective(objective)
        check_of_one_kind(asked, {"runnable": runnable, "risk": risk is not None, "fix": bool(fix)})
        return choose_mixed(tables, asked, framework=framework, top=top)
    choice = decide(
        tables,
        cluster,
        objective=objective,
        runnable=runnable,
        framework=framework,
        risk=risk,
        fix=fix,
    )
    return choice.plans[:top]


def check_of_one_kind(cluster: str, given: Mapping[str, bool]) -> None:
    """Raises `ConfigError` for an argument that is of one kind of device."""
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(f"{name} is of one kind of device, and {cluster} has more; leave it out")
