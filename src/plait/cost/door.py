"""`plait.estimate`: a config, a plan and a cluster in, an `Estimate` out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.cluster import Cluster
from plait.cost.describe import describe
from plait.cost.machine import Efficiency, Machine, machine_of
from plait.cost.records import Estimate, Job, Runtime
from plait.cost.step import estimate_job
from plait.errors import ConfigError, WorldSizeError
from plait.plan import Plan
from plait.toml import parse_value, read_toml


def estimate(
    config: Mapping[str, Any] | str | Path,
    plan: Plan | str | None = None,
    cluster: Cluster | str | None = None,
    *,
    runtime: Runtime | None = None,
    efficiency: Efficiency | None = None,
) -> Estimate:
    """Predict one plan: no process group, no tensor, milliseconds.

    `config` is a TOML path or a mapping with its tables ([model], [data], [train], and [plan], [cluster] where `plan` or `cluster`
    are left out). `runtime` and `efficiency` replace how plait runs and how well devices do.

    Raises `PlanError` for a plan that cannot be, `WorldSizeError` for one larger than the cluster, `ModelError` for a model that
    cannot be described, `ClusterError` for an unknown cluster.
    """
    tables = config_tables(config)
    chosen = plan_of(tables, plan)
    machines = cluster_of(tables, cluster)
    if chosen.world_size > machines.num_devices:
        raise WorldSizeError(
            f"plan '{chosen}' needs {chosen.world_size} devices and {machines.name} has {machines.num_devices}; "
            f"ask for {machines.device.name}x{chosen.world_size}"
        )
    return estimate_job(job_of(tables, chosen, runtime), chosen, machine_of(machines, efficiency))


def config_tables(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The tables of a config: a mapping as it is, a TOML file, or a Hugging Face config.json as the model."""
    if isinstance(config, Mapping):
        return config if "model" in config else {"model": config}
    if hasattr(config, "model_dump"):
        return dict(config.model_dump())
    path = Path(config)
    if path.suffix == ".json":
        return {"model": json.loads(path.read_text(encoding="utf-8"))}
    return read_toml(path, ConfigError)


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Mapping[str, Any]:
    """The tables of a config file with `section.key=value` overrides.

    Raises `ConfigError` for an override that is no assignment.
    """
    tables = {section: dict(table) if isinstance(table, Mapping) else table for section, table in config_tables(path).items()}
    for override in overrides:
        key, equals, value = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot:
            raise ConfigError(f"--set {override!r}: write section.key=value, for example train.global_batch=64")
        tables.setdefault(section, {})[name] = parse_value(value)
    return tables


def plan_of(tables: Mapping[str, Any], plan: Plan | str | None) -> Plan:
    """The plan asked for, or the config's own."""
    if plan is None:
        plan = tables.get("plan", {}).get("text", "dp1")
    return (Plan.parse(plan) if isinstance(plan, str) else plan).check()


def cluster_of(tables: Mapping[str, Any], cluster: Cluster | str | None) -> Cluster:
    """The cluster asked for, or the config's own."""
    if cluster is None:
        cluster = tables.get("cluster", {}).get("name", "local")
    return Cluster.parse(cluster) if isinstance(cluster, str) else cluster


def job_of(tables: Mapping[str, Any], plan: Plan, runtime: Runtime | None = None) -> Job:
    """The job of a config; without a global batch, one sample for each micro-batch and data rank."""
    train = tables.get("train", {})
    batch = int(train.get("global_batch") or plan.dp.size * plan.micro_batches)
    momentum = float(train.get("momentum") or 0)
    optimizer = str(train.get("optimizer") or "adamw")
    if optimizer == "sgd" and momentum:
        optimizer = "momentum"
    return Job(described(tables), batch, optimizer, runtime or Runtime())


def described(tables: Mapping[str, Any]) -> Any:
    """The description of the config's model, for samples of its length."""
    return describe(tables)


def machine(cluster: Cluster | str) -> Machine:
    """The machine of a cluster by name."""
    return machine_of(Cluster.parse(cluster) if isinstance(cluster, str) else cluster)
