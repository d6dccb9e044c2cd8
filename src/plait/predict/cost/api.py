"""`plait.estimate`: a config, a plan and a cluster in, an `Estimate` out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.cluster import Cluster
from plait.cluster.mixed import MixedCluster
from plait.cluster.products import FIXED
from plait.errors import PlanError, WorldSizeError
from plait.plan import KeepGathered, Plan, check_batch, check_kept, check_shares, whole_shares
from plait.plan.fit import check_messages, check_offload
from plait.predict.cost.frameworks import PLAIT, Framework, framework_of
from plait.predict.cost.machines import machine_of
from plait.predict.cost.mixed import estimate_mixed, machines_of
from plait.predict.cost.model.adapters import adapters_of
from plait.predict.cost.model.describe import describe
from plait.predict.cost.model.operations import Attention, Matmul
from plait.predict.cost.model.tables import config_tables, global_batch, with_lengths
from plait.predict.cost.records import Estimate, Job
from plait.predict.cost.runtime import Runtime
from plait.predict.cost.step import estimate_job
from plait.predict.cost.time.machine import Efficiency, Machine
from plait.values import JsonMapping


def estimate(
    config: Mapping[str, object] | str | Path,
    plan: Plan | str | None = None,
    cluster: Cluster | str | None = None,
    *,
    framework: Framework | str = "plait",
    runtime: Runtime | None = None,
    efficiency: Efficiency | None = None,
) -> Estimate:
    """Predict one plan, without a process group and without tensors.

    Args:
        config: a TOML path or a mapping with its tables: [model], [data], [train], and [plan],
            [cluster] where `plan` or `cluster` are left out.
        plan: a `Plan` or its text.
        cluster: the devices, or their name as `Cluster.parse` reads it.
        framework: who runs the plan.
        runtime: replaces how the framework runs it.
        efficiency: replaces how well devices do.

    Returns:
        The estimate, in seconds of a step, bytes of the fullest rank and dollars.

    Raises:
        PlanError: an impossible plan.
        WorldSizeError: a plan that is larger than the cluster.
        ModelError: a model without a description.
        ClusterError: an unknown cluster.
        ConfigError: an unknown framework.
    """
    tables = config_tables(config)
    runs = framework_of(framework)
    chosen = plan_of(tables, plan)
    check_experts(chosen, runs)
    if MixedCluster.is_mixed(cluster or cluster_name(tables)):
        mixed = MixedCluster.parse(str(cluster or cluster_name(tables)))
        job = job_of(tables, chosen, runs, runtime, num_devices=mixed.num_devices)
        check_job(chosen, job, tables)
        return estimate_mixed(job, chosen, mixed, machines_of(mixed))
    machines = cluster_of(tables, cluster)
    check_size(chosen, machines)
    job = job_of(tables, chosen, runs, runtime, num_devices=machines.num_devices)
    check_job(chosen, job, tables)
    machines.device.peak_flops(chosen.precision)
    return estimate_job(job, chosen, machine_of(machines, efficiency))


def check_question(
    tables: Mapping[str, object], plan: Plan | str | None, framework: Framework | str = "plait"
) -> Plan:
    """The plan that is asked about. Raises every error of `estimate` that needs no machine, so that
    one is measured for good questions alone.
    """
    runs = framework_of(framework)
    chosen = plan_of(tables, plan)
    check_experts(chosen, runs)
    check_job(chosen, job_of(tables, chosen, runs), tables)
    return chosen


def check_job(chosen: Plan, job: Job, tables: JsonMapping) -> None:
    """Raises `PlanError` for a plan that cannot divide the batch, the samples or the shares, or
    round its messages.
    """
    check_batch(chosen, job.global_batch)
    check_messages(chosen, job.messages)
    check_offload(chosen, offloads=job.offload_activations)
    check_sequence(chosen, job)
    check_shares(chosen, shares_in(tables), job.global_batch)
    check_kept(chosen, kept_in(tables))


def check_experts(chosen: Plan, runs: Framework) -> None:
    """Raises `PlanError` for experts over tensor ranks under a framework that has them not."""
    if chosen.folds_experts and not runs.folds_experts:
        lenders = chosen.dp.size * chosen.cp.size
        raise PlanError(
            f"plan '{chosen}': {runs.name} takes the ranks of experts from dp{chosen.dp.size} x "
            f"cp{chosen.cp.size} = {lenders}; take ep{lenders}, or --framework megatron-core, "
            "which may take those of tp as well"
        )


def check_sequence(chosen: Plan, job: Job) -> None:
    """Raises `PlanError` for a context axis over samples that are no sequences.

    `train` refuses it for them as well, be they images or rows of features.
    """
    operations = [op for block, _ in job.model.runs for op in block.operations]
    has_images = any(isinstance(op, Matmul) and op.convolution for op in operations)
    has_attention = any(isinstance(op, Attention) for op in operations)
    has_rows = job.model.seq_len == 1 and not has_attention
    if chosen.cp.size > 1 and (has_images or has_rows):
        raise PlanError(
            f"plan '{chosen}': {job.model.name} has no sequence that cp{chosen.cp.size} could "
            "divide; leave cp out"
        )


def check_size(chosen: Plan, machines: Cluster) -> None:
    """Raises `WorldSizeError` for a plan larger than the cluster; the ranks of a processor may
    share its cores.
    """
    if chosen.world_size > machines.num_devices and not machines.shares_cores:
        raise WorldSizeError(
            f"plan '{chosen}' needs {chosen.world_size} devices and {machines.name} has "
            f"{machines.num_devices}; "
            f"{machines.how_to_have(chosen.world_size)}"
        )


def plan_of(tables: JsonMapping, plan: Plan | str | None) -> Plan:
    """The plan asked for, or the config's own."""
    if plan is None:
        plan = tables.get("plan", {}).get("text", "dp1")
    return (plan if isinstance(plan, Plan) else Plan.parse(plan)).check()


def cluster_of(tables: JsonMapping, cluster: Cluster | str | None) -> Cluster:
    """The cluster asked for, or the config's own; its processors multiply as the config says."""
    if cluster is None:
        cluster = cluster_name(tables)
    found = cluster if isinstance(cluster, Cluster) else Cluster.parse(cluster)
    table = FIXED.get(tables.get("train", {}).get("linear_product"))
    return found if table is None else found.multiplying_by(table)


def cluster_name(tables: JsonMapping) -> str:
    """The config's own cluster, else this machine."""
    return str(tables.get("cluster", {}).get("name", "local"))


def job_of(
    tables: JsonMapping,
    plan: Plan | None,
    runs: Framework = PLAIT,
    runtime: Runtime | None = None,
    *,
    num_devices: int | None = None,
) -> Job:
    """The job of a config, at the samples a step that it says or that `plan` and `num_devices` ask
    for.
    """
    train = tables.get("train", {})
    batch = global_batch(tables, num_devices or (plan.world_size if plan is not None else 1), plan)
    momentum = float(train.get("momentum") or 0)
    optimizer = str(train.get("optimizer") or "adamw")
    if optimizer == "sgd" and momentum:
        optimizer = "momentum"
    model = described(tables, runs)
    shares = whole_shares(shares_in(tables))
    counts = tuple(tables.get("plan", {}).get("counts") or ())
    chosen = runtime or runs.runtime
    if train.get("messages") == "bf16" and runs is PLAIT:
        chosen = replace(chosen, message_bytes=2)
    remat = tuple(tables.get("plan", {}).get("remat") or ())
    offloads = bool(tables.get("plan", {}).get("offload_activations")) and runs is PLAIT
    kept = kept_in(tables)
    if plan is None and kept == "auto":  # of many plans each would be as full as it can be
        kept = None
    adapters = adapters_of(tables, model)
    return Job(model, batch, optimizer, chosen, adapters, shares, counts, remat, offloads, kept)


def kept_in(tables: JsonMapping) -> KeepGathered:
    """The config's blocks that zero3 keeps whole."""
    kept = tables.get("plan", {}).get("keep_gathered")
    return tuple(kept) if isinstance(kept, (list, tuple)) else kept


def shares_in(tables: JsonMapping) -> tuple[float, ...]:
    """The config's parts of a batch by data rank; none where it says none."""
    return tuple(tables.get("plan", {}).get("shares") or ())


def described(tables: JsonMapping, runs: Framework = PLAIT) -> Any:
    """The description of the config's model, for samples of its length. Attention and loss are as
    the framework computes them, unless the config says.
    """
    model = tables.get("model")
    if isinstance(model, Mapping):
        tables = {**tables, "model": runs.with_kernels(model)}
    return describe(with_lengths(tables))


def machine(cluster: Cluster | str) -> Machine:
    """The machine of a cluster by name."""
    return machine_of(Cluster.parse(cluster) if isinstance(cluster, str) else cluster)
