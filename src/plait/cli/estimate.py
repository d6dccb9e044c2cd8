"""`plait estimate`: time, memory and traffic of one plan, before anything runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from plait.cli import common
from plait.cli.answer import Answer, Json
from plait.cli.parser import UsageError
from plait.cluster.mixed import MixedCluster
from plait.errors import PlanError
from plait.plan import kept_text, remat_text
from plait.values import JsonMapping

if TYPE_CHECKING:
    from plait.cluster import Cluster
    from plait.plan import Plan
    from plait.predict.cost.frameworks import Framework
    from plait.predict.cost.model.operations import Model
    from plait.predict.cost.records import Estimate, Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait estimate`."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a TOML file with [model], [data], [train], a Hugging Face config.json, or a known "
        "model such as llama3-8b",
    )
    parser.add_argument("--plan", metavar="TEXT", help="the plan (default: the config's plan)")
    common.add_cluster(parser)
    common.add_framework(parser)
    parser.add_argument(
        "--timeline",
        action="store_true",
        help="also list the actions of each rank of one pipeline, with their times",
    )
    common.add_campaign(parser)
    common.add_overrides(parser, "train.global_batch=64 data.seq_len=4096")


def run(arguments: argparse.Namespace) -> Answer:
    """The prediction; the exit code is 1 when the plan does not fit."""
    from plait.predict.cost.model.from_config import described_once
    from plait.predict.cost.model.tables import read_config

    with described_once():
        return answer(read_config(arguments.config, arguments.overrides), arguments)


def answer(tables: JsonMapping, arguments: argparse.Namespace) -> Answer:
    """The answer for the tables of a config; of `arguments`, the options beside the config."""
    from plait.predict.cost import estimate
    from plait.predict.cost.api import check_question, cluster_name, cluster_of, job_of
    from plait.predict.cost.campaign import campaign
    from plait.predict.cost.frameworks import framework_of
    from plait.predict.cost.model.tables import assumed

    check_question(tables, arguments.plan, arguments.framework)
    if MixedCluster.is_mixed(arguments.cluster or cluster_name(tables)):
        return _mixed_answer(tables, arguments)
    common.measured(arguments.cluster or cluster_name(tables))
    guess = estimate(tables, arguments.plan, arguments.cluster, framework=arguments.framework)
    runs = framework_of(arguments.framework)
    job = job_of(
        tables, guess.plan, runs, num_devices=cluster_of(tables, arguments.cluster).num_devices
    )
    machines = cluster_of(tables, arguments.cluster)
    costs = common.costs_of(arguments, machines.name)
    open_keys = assumed(tables, job.global_batch, job.model.seq_len)
    data = {
        **guess.as_dict(),
        **campaign(guess, arguments.tokens, arguments.mtbf, costs),
        "framework": runs.name,
        "notes": [
            *notes(job.model, guess.plan, runs),
            *device_notes(guess.plan, machines),
            *remat_notes(guess),
            *offload_notes(job, machines),
            *open_keys,
        ],
    }
    if not arguments.timeline:
        return Answer(data, _view(data), ok=guess.fits)
    drawn, data["timeline"] = timeline(job, guess.plan, machines)
    return Answer(data, f"{_view(data)}\n\n{drawn}", ok=guess.fits)


def _mixed_answer(tables: JsonMapping, arguments: argparse.Namespace) -> Answer:
    """The answer for two kinds of device. Errors: `UsageError` for a timeline."""
    from plait.predict.cost import estimate
    from plait.predict.cost.api import job_of
    from plait.predict.cost.campaign import campaign
    from plait.predict.cost.frameworks import framework_of
    from plait.predict.cost.model.tables import assumed

    if arguments.timeline:
        raise UsageError("--timeline is of one kind of device; leave it out")
    guess = estimate(tables, arguments.plan, arguments.cluster, framework=arguments.framework)
    runs = framework_of(arguments.framework)
    job = job_of(tables, guess.plan, runs, num_devices=guess.num_devices)
    data = {
        **guess.as_dict(),
        **campaign(guess, arguments.tokens, arguments.mtbf, common.costs_of(arguments)),
        "framework": runs.name,
        "notes": assumed(tables, job.global_batch, job.model.seq_len),
    }
    return Answer(data, _view(data), ok=guess.fits)


def timeline(job: Job, plan: Plan, cluster: Cluster) -> tuple[str, list[Json]]:
    """The step's timeline for a terminal, and its spans. Errors: `PlanError` for too long a one."""
    from plait.predict.cost.machines import machine_of
    from plait.predict.cost.step_timeline import check_drawable, step_timeline
    from plait.trace.render import render

    check_drawable(plan)
    step = step_timeline(job, plan, machine_of(cluster))
    spans = [
        {
            "rank": span.rank,
            "name": span.name,
            "kind": span.kind,
            "start_seconds": span.start_seconds,
            "seconds": span.seconds,
        }
        for span in step.spans
    ]
    return render(step), spans


def notes(model: Model, plan: Plan, runs: Framework | None = None) -> list[str]:
    """The reason for which `plait train` would refuse the plan for this model. Others pad sizes
    that do not divide, so the plan has a price here. Of another framework, that it has no such
    plan.
    """
    if runs is not None and runs.name != "plait":
        return (
            []
            if runs.offers(plan)
            else [f"{runs.name} does not offer all of '{plan}': see plait export plan"]
        )
    from plait.plan.fit import check_config
    from plait.predict.cost.model.operations import Attention

    sizes = {**model.sizes, "seq_len": model.seq_len if model.seq_len > 1 else None}
    try:
        check_config(plan, sizes)
    except PlanError as error:
        return [f"plait train would refuse this: {error}"]
    if plan.cp.size > 1 and not any(
        isinstance(op, Attention) for block, _ in model.runs for op in block.operations
    ):
        return [
            f"plait train would refuse this: {plan.cp} splits attention, and {model.name} has "
            "none; leave it out"
        ]
    if plan.tp.size > 1 and plan.tp.mode == "1d" and not _has_divided_layers(model):
        return [
            f"no layer of {model.name} is divided by a role in [model.roles], or by one that its "
            f"forward shows without values, so {plan.tp} is priced with whole layers; plait roles "
            "CONFIG prints what plait train divides: paste it for a prediction of its parts"
        ]
    return []


def _has_divided_layers(model: Model) -> bool:
    """Whether a tensor axis divides a product of the model."""
    from plait.predict.cost.model.operations import Matmul

    products = (op for block, _ in model.runs for op in block.operations if isinstance(op, Matmul))
    return any(op.split != "none" for op in products)


def device_notes(plan: Plan, cluster: Cluster) -> list[str]:
    """The precision that stands in for one that the device does not have."""
    from plait.cluster.presets import PRESETS

    preset = PRESETS.get(cluster.device.name)
    if plan.precision != "bf16" or preset is None or not preset.float16_only:
        return []
    return [
        f"{cluster.device.name} has no bf16; this is its rate in float16 (train.float16) with "
        "precision:float32"
    ]


def remat_notes(guess: Estimate) -> list[str]:
    """That no choice of blocks fits, where `remat:auto` has none that does."""
    if not guess.remat or guess.fits:
        return []
    return [f"no choice of remat:auto fits; this is the smallest, {remat_text(guess.remat)}"]


def offload_notes(job: Job, cluster: Cluster) -> list[str]:
    """Where activations wait, for a config that moves them."""
    if not job.offload_activations:
        return []
    if cluster.shares_cores:
        return ["offload_activations: a processor copies them within its own memory, for nothing"]
    return [
        "activations of blocks wait in the host's memory, two blocks are on the device; copies go "
        "at 25 GB/s (PCIe 4 x16) beside the kernels"
    ]


def _view(data: Json) -> str:
    return "\n".join([*lines(data), *(f"note       {note}" for note in data["notes"])])


SPENT = {"bubble": "waiting for other stages"}
"""Causes whose name would be read as another number: a bubble and what uneven stages add to it."""


def _half(data: Json) -> str:
    if data["mfu_causal"] > 0.999 * data["mfu"]:
        return ""
    return f", {data['mfu_causal']:.1%} with the causal half of attention"


def lines(data: Json) -> list[str]:
    """A prediction for people."""
    memory = data["memory"]
    limit = data["memory_limit"]
    parts = ", ".join(
        f"{name} {size(memory[name])}"
        for name in ("parameters", "gradients", "optimizer", "activations", "buffers")
    )
    sent = (
        ", ".join(f"{axis} {size(count)}" for axis, count in data["traffic"].items() if count)
        or "nothing"
    )
    causes = sorted(data["breakdown_seconds"].items(), key=lambda item: -item[1])
    spent = ", ".join(
        f"{SPENT.get(name, name)} {seconds / data['step_seconds']:.0%}"
        for name, seconds in causes
        if seconds > 0.005 * data["step_seconds"]
    )
    verdict = "fits" if data["fits"] else "DOES NOT FIT"
    return [
        f"plan       {data['plan']}",
        *([f"remat      {remat_text(data['remat'])}"] if "remat" in data else []),
        *([f"kept whole {kept_text(data['keep_gathered'])}"] if "keep_gathered" in data else []),
        f"step       {data['step_seconds']:.4g} s predicted, {data['tokens_per_second']:,.0f} "
        f"{data['unit']}/s, "
        f"{data['tflops_per_device']:.1f} TFLOP/s a device (MFU {data['mfu']:.1%}{_half(data)}), "
        f"bubble {data['bubble_fraction']:.1%}",
        f"spent on   {spent}",
        f"memory     {size(memory['total'])} of {size(limit)} on the fullest rank ({verdict}): "
        f"{parts}",
        f"90 % bars  {_bar(data['bars']['step_seconds'], seconds_text)} a step, "
        f"{_bar(data['bars']['memory_total'], size)} of memory; "
        f"fits with probability {data['fits_probability']:.0%}",
        f"traffic    {sent}  sent by a rank in a step",
        f"price      {data['cost_per_million_tokens']:.4g} USD for a million {data['unit']}",
        *campaign_lines(data),
    ]


def campaign_lines(data: Json) -> list[str]:
    """The whole run for people, as far as it was asked about."""
    lines = []
    if "days" in data and not math.isfinite(data["days"]):
        lines.append(
            f"run        {data['tokens']:.4g} tokens are never trained: devices fail so often that "
            "no useful work remains"
        )
    elif "days" in data:
        energy = data["energy_kwh"]
        power = "energy unknown" if energy is None else f"{energy:,.0f} kWh of boards"
        low, high = data["days_bar"]
        lines.append(
            f"run        {data['tokens']:.4g} tokens in {data['days']:,.1f} days ({low:,.1f} to "
            f"{high:,.1f}), {data['device_hours']:,.0f} device hours, {data['price']:,.0f} USD, "
            f"{power}"
        )
    if "goodput" in data:
        failures = data["goodput"]
        lines.append(
            f"failures   {failures['failures_per_day']:.3g} a day; at best "
            f"{failures['useful_fraction']:.1%} of the time is useful"
        )
        for name in ("snapshots", "checkpoints"):
            kept = failures[name]
            lines.append(
                f"           {name} every {seconds_text(kept['interval_seconds'])} "
                f"({kept['interval_steps']:,} steps), {seconds_text(kept['seconds'])} each: "
                f"{kept['useful_fraction']:.1%}"
            )
        if failures["measured"]:
            lines.append(f"           measured: {', '.join(failures['measured'])}")
    return lines


def seconds_text(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds:.3g} s"


def _bar(ends: list[float], text: Callable[[float], str]) -> str:
    return f"{text(ends[0])} to {text(ends[1])}"


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.3g} {unit}"
        count /= 1000
    return ""
