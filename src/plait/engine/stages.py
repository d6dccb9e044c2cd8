"""From a cut to the stages of one rank: their modules, the units of their parameters, copies of what is tied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from plait import data
from plait.data import Unit
from plait.engine.cut import Cut
from plait.engine.holding import Holding, shapes_of
from plait.pipeline.actions import Kind, Schedule
from plait.pipeline.chain import ChainStage, WholeModel
from plait.pipeline.deferred import Deferral
from plait.pipeline.stage import Stage, StageModule

Call = Callable[[nn.Module, Any], Any]


@dataclass
class Stages:
    """The stages of one rank, by number, and their units; `secondary[s]` are names that an earlier stage counts."""

    holding: Holding
    stages: dict[int, Stage] = field(default_factory=dict)
    units: dict[int, list[Unit]] = field(default_factory=dict)
    secondary: dict[int, frozenset[str]] = field(default_factory=dict)


def make_stages(model: nn.Module, blocks: Sequence[str], plan: Cut, schedule: Schedule, *, rank: int, call: Call) -> Stages:
    """The stages that `rank` (a coordinate on the pp axis) holds. Parameters have their place-holders already."""
    own = schedule.stages(rank)
    shapes, buffers = shapes_of(model)
    params = dict(model.named_parameters())
    units = data.split_units(model, blocks)
    made = Stages(Holding(model, {}, shapes, frozenset()))
    held: dict[str, nn.Parameter] = {}
    splits = any(action.kind is Kind.WEIGHT_GRAD for action in schedule)
    for stage in own:
        links = [(name, model.get_submodule(name)) for name in plan.links[stage]]
        modules = {module for _, link in links for module in link.modules()}
        local = {name: params[name] for name in plan.params[stage]}
        for name in plan.params[stage] & held.keys():
            local[name] = _copy(params[name], modules)
        held |= {name: param for name, param in local.items() if name not in held}
        deferral = Deferral() if splits else None
        if deferral is not None:
            deferral.install(modules)
        made.stages[stage] = Stage(_module(model, links, plan, stage, call), stage, deferral)
        made.secondary[stage] = frozenset(name for name in local if plan.holders(name)[0] < stage)
        tied = frozenset(name for name in local if len(plan.holders(name)) > 1)
        made.units[stage] = stage_units(units, local, tied, modules)
    secondary = frozenset(name for name in held if plan.holders(name)[0] not in own)
    made.holding = Holding(model, held, shapes, _buffers(model, plan, own, buffers), secondary)
    return made


def _module(model: nn.Module, links: list[tuple[str, nn.Module]], plan: Cut, stage: int, call: Call) -> StageModule:
    if plan.num_stages == 1:
        return WholeModel(model, call)
    return ChainStage(links, call, last=stage == plan.num_stages - 1)


def _copy(param: nn.Parameter, modules: set[nn.Module]) -> nn.Parameter:
    """Give the modules a parameter of their own in place of one that another stage of this rank has."""
    own = nn.Parameter(param.data, requires_grad=param.requires_grad)
    for module in modules:
        for key, there in module._parameters.items():
            if there is param:
                module._parameters[key] = own
    return own


def stage_units(
    units: Sequence[Unit], local: dict[str, nn.Parameter], tied: frozenset[str], modules: set[nn.Module]
) -> list[Unit]:
    """The units of the whole model, narrowed to one stage; every tied parameter becomes a unit of its own."""
    found: list[Unit] = []
    for unit in units:
        names = [name for name, _ in unit.params if name in local]
        found += [Unit(f"tied {name}", params=[(name, local[name])]) for name in names if name in tied]
        kept = [(name, local[name]) for name in names if name not in tied]
        used = [module for module in unit.modules if module in modules]
        if kept or used:
            found.append(Unit(unit.name, unit.is_block, kept, used))
    return found


def _buffers(model: nn.Module, plan: Cut, own: Sequence[int], buffers: frozenset[str]) -> frozenset[str]:
    """Buffers of the own links; those outside all links are the first stage's."""
    elsewhere = tuple(
        f"{link}." for stage, links in enumerate(plan.links) if stage not in own for link in links if plan.num_stages > 1
    )
    here = tuple(f"{link}." if link else "" for stage in own for link in plan.links[stage])
    return frozenset(
        name for name in buffers if name.startswith(here) or (0 in own and not name.startswith(elsewhere or ("\0",)))
    )
