"""`plait.estimate`: a config, a plan and a cluster in, an `Estimate` out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.cluster import Cluster
from plait.config.huggingface import NO_EFFECT
from plait.cost.describe import ALIASES, DESCRIBED, describe
from plait.cost.frameworks import PLAIT, Framework, framework_of
from plait.cost.machine import Efficiency, Machine, machine_of
from plait.cost.records import Estimate, Job, Runtime
from plait.cost.step import estimate_job
from plait.errors import ConfigError, WorldSizeError, nearest
from plait.plan import Plan
from plait.toml import parse_value, read_toml


def estimate(
    config: Mapping[str, Any] | str | Path,
    plan: Plan | str | None = None,
    cluster: Cluster | str | None = None,
    *,
    framework: Framework | str = PLAIT,
    runtime: Runtime | None = None,
    efficiency: Efficiency | None = None,
) -> Estimate:
    """Predict one plan: no process group, no tensor, milliseconds.

    `config` is a TOML path or a mapping with its tables ([model], [data], [train], and [plan], [cluster] where `plan` or
    `cluster` are left out). `framework` says who runs the plan; `runtime` and `efficiency` replace how it runs and how well
    devices do.

    Raises `PlanError` for a plan that cannot be, `WorldSizeError` for one larger than the cluster, `ModelError` for a model
    that cannot be described, `ClusterError` for an unknown cluster, `ConfigError` for an unknown framework.
    """
    tables, runs = config_tables(config), framework_of(framework)
    chosen = plan_of(tables, plan)
    machines = cluster_of(tables, cluster)
    if chosen.world_size > machines.num_devices and machines.host is None:  # ranks may share the cores of a processor
        raise WorldSizeError(
            f"plan '{chosen}' needs {chosen.world_size} devices and {machines.name} has {machines.num_devices}; "
            f"ask for {machines.device.name}x{chosen.world_size}"
        )
    return estimate_job(job_of(tables, chosen, runs, runtime), chosen, machine_of(machines, efficiency))


def config_tables(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The tables of a config: a mapping as it is, a TOML file, or a Hugging Face config.json as the model.

    Raises `ConfigError` for a key that no model or section has.
    """
    if not isinstance(config, Mapping) and hasattr(config, "as_dict"):
        config = config.as_dict()
    if isinstance(config, Mapping):
        tables = config if "model" in config else {"model": config}
    elif Path(config).suffix == ".json":
        tables = {"model": _json(Path(config))}
    else:
        tables = read_toml(config, ConfigError)
    check_keys(tables)
    return tables


def _json(path: Path) -> Mapping[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ConfigError(f"{path}: cannot be read as JSON: {cause}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: a config.json is one JSON object")
    return table


def check_keys(tables: Mapping[str, Any]) -> None:
    """Refuse sections and keys that nothing reads. A pasted config.json (`model_type`, no `name`) may have any keys."""
    from plait.config import MODELS, ClusterSection, Data, Federated, PlanSection, Train
    from plait.config.read import nearest_key

    sections: dict[str, Any] = {"data": Data, "train": Train, "plan": PlanSection, "cluster": ClusterSection}
    sections["federated"] = Federated
    for section, table in tables.items():
        if section != "model" and section not in sections:
            raise ConfigError(f"unknown section [{section}]; {nearest(section, [*sections, 'model'])}")
        if not isinstance(table, Mapping):
            if section == "model" and hasattr(table, "named_modules"):
                continue
            raise ConfigError(f"[{section}] must be a table of keys, not {table!r}")
        if section != "model":
            known = set(sections[section].model_fields)
        elif table.get("name") in MODELS:
            known = known_model_keys(set(MODELS[table["name"]].model_fields))
        elif "name" in table:
            raise ConfigError(f"[model] name {table['name']!r} is unknown; {nearest(str(table['name']), MODELS)}")
        else:
            continue
        for key in table:
            if key not in known:
                raise ConfigError(f"unknown key {section}.{key}; {nearest_key(section, str(key), known)}")


def known_model_keys(own: set[str]) -> set[str]:
    """The keys of a model, with the names that other families give them and those that only a description reads."""
    if "num_attention_heads" not in own:
        return own
    aliases = {alias for key in own for alias in ALIASES.get(key, ())}
    return own | aliases | NO_EFFECT | DESCRIBED


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
    check_keys(tables)
    return tables


def plan_of(tables: Mapping[str, Any], plan: Plan | str | None) -> Plan:
    """The plan asked for, or the config's own."""
    if plan is None:
        plan = tables.get("plan", {}).get("text", "dp1")
    return (Plan.parse(plan) if isinstance(plan, str) else plan).check()


def cluster_of(tables: Mapping[str, Any], cluster: Cluster | str | None) -> Cluster:
    """The cluster asked for, or the config's own; its processors multiply as the config says."""
    if cluster is None:
        cluster = cluster_name(tables)
    found = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if found.host is not None and tables.get("train", {}).get("linear_product") == "torch":
        return replace(found, host=replace(found.host, rule=None))
    return found


def cluster_name(tables: Mapping[str, Any]) -> str:
    """The config's own cluster, else this machine."""
    return str(tables.get("cluster", {}).get("name", "local"))


def job_of(tables: Mapping[str, Any], plan: Plan, runs: Framework = PLAIT, runtime: Runtime | None = None) -> Job:
    """The job of a config; without a global batch, one sample for each micro-batch and data rank."""
    train = tables.get("train", {})
    batch = int(train.get("global_batch") or plan.dp.size * plan.micro_batches)
    momentum = float(train.get("momentum") or 0)
    optimizer = str(train.get("optimizer") or "adamw")
    if optimizer == "sgd" and momentum:
        optimizer = "momentum"
    return Job(described(tables, runs), batch, optimizer, runtime or runs.runtime)


def described(tables: Mapping[str, Any], runs: Framework = PLAIT) -> Any:
    """The description of the config's model, for samples of its length; attention as the framework computes it, unless the
    config says."""
    model = tables.get("model")
    if isinstance(model, Mapping) and "attn_implementation" not in model and runs.attention != PLAIT.attention:
        tables = {**tables, "model": {**model, "attn_implementation": runs.attention}}
    return describe(tables)


def machine(cluster: Cluster | str) -> Machine:
    """The machine of a cluster by name."""
    return machine_of(Cluster.parse(cluster) if isinstance(cluster, str) else cluster)
