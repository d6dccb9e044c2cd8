"""Keys of a config that do nothing under its plan: each is right for other plans or machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from plait.launcher import joined_world
from plait.launcher.main_process import say
from plait.plan import Plan, shares_text
from plait.plan.facts import SCHEDULES
from plait.plan.fit import rounds_messages

if TYPE_CHECKING:
    from plait.config import Config
    from plait.config.model import Section


_STAGES: Final = ("counts", "splits", "schedule", "measure", "stage_memory_gb")


class _Reader(NamedTuple):
    """Keys of a section, whether a plan reads them, and what the plan lacks otherwise."""

    keys: tuple[str, ...]
    reads: bool
    lack: str


def tell_unused(config: Config, plan: Plan) -> None:
    """Say which keys do nothing here, a line each."""
    for line in unused_keys(config, plan):
        say(f"plait: {line}")


def unused_keys(config: Config, plan: Plan) -> Iterator[str]:
    """A sentence for each key that was changed and is not read under the plan, on this machine."""
    train = config.train
    yield from _of_axes(config, plan)
    if train.messages != "whole" and not rounds_messages(plan, train.messages):
        yield (
            f"plan '{plan}' sends no activations of more than two bytes a number between "
            f"stages or tensor ranks, so train.messages '{train.messages}' does nothing"
        )
    if train.min_lr and train.schedule == "constant":
        yield (
            f"train.schedule is 'constant', so train.min_lr {train.min_lr:g} does nothing; "
            "say train.schedule 'linear' or 'cosine'"
        )
    if train.optimizer == "sgd":
        for key in _changed(train, ("betas", "eps")):
            yield f"train.optimizer is 'sgd', so train.{key} does nothing"
    yield from _of_interfaces(config.cluster.interface)


def _of_axes(config: Config, plan: Plan) -> Iterator[str]:
    """The keys that plans with certain axes read."""
    section = config.plan
    if len(section.shares or ()) > 1 and plan.dp.size == 1:
        shares = shares_text(section.shares or ())
        yield f"plan '{plan}' has one data rank, so plan.shares {shares} does nothing"
    for reader in _readers_in_train(plan):
        if not reader.reads:
            for key in _changed(config.train, reader.keys):
                yield f"plan '{plan}' has no {reader.lack}, so train.{key} does nothing"
    for reader in _readers_in_plan(plan):
        if not reader.reads:
            for key in _changed(section, reader.keys):
                yield f"plan '{plan}' has no {reader.lack}, so plan.{key} does nothing"


def _readers_in_train(plan: Plan) -> tuple[_Reader, ...]:
    strategy = plan.dp.strategy
    return (
        _Reader(("outer_lr", "outer_momentum", "compress"), strategy == "local", "dp:local axis"),
        _Reader(("staleness_rate",), strategy == "async-server", "dp:async-server axis"),
        _Reader(
            ("num_servers",),
            strategy in ("server", "async-server"),
            "parameter servers (dp:server)",
        ),
        _Reader(("place_experts_every", "spare_expert_slots"), plan.ep > 1, "expert axis (ep)"),
    )


def _readers_in_plan(plan: Plan) -> tuple[_Reader, ...]:
    is_pipeline = plan.pp.size > 1
    splits = is_pipeline and SCHEDULES[plan.pp.schedule].splits_backward
    return (
        _Reader(_STAGES, is_pipeline, "pipeline axis (pp)"),
        _Reader(("weight_grad_group",), splits, "schedule with a split backward (as zb-h1)"),
        _Reader(("remat",), plan.remat == "auto", "remat:auto"),
    )


def _changed(section: Section, keys: tuple[str, ...]) -> Iterator[str]:
    """The keys of a section that have another value than their default, with that value."""
    fields = type(section).model_fields
    for key in keys:
        value = getattr(section, key)
        if value != fields[key].default:
            yield f"{key} {value}"


def _of_interfaces(interface: str | None) -> Iterator[str]:
    """The interface that ranks listen on, where this machine has none of its name."""
    if interface is None or joined_world() is not None:
        return
    from plait.comm.network import interfaces

    if interface not in interfaces():
        yield (
            f"this machine has no network interface '{interface}' (cluster.interface), "
            f"which has {', '.join(interfaces())}; ranks of one machine listen on loopback "
            "and do without"
        )
