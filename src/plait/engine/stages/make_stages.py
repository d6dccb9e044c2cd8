"""From a cut to the stages of one rank: their modules, the units of their parameters, copies of
what is tied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from plait.engine.stages.cut import Cut
from plait.engine.state.holding import Holding, shapes_of
from plait.parallel import data
from plait.parallel.data import DataStrategy, Unit
from plait.parallel.pipeline.actions import Schedule
from plait.parallel.pipeline.chain import ChainStage, WholeModel
from plait.parallel.pipeline.replayed import ParameterSwap, Replay, ReplayedStage
from plait.parallel.pipeline.stage import Stage, StageModule
from plait.parallel.pipeline.weight_grad_store import WeightGradStore
from plait.products import Products

Call = Callable[[nn.Module, Any], Any]


@dataclass
class Stages:
    """The stages of one rank, by number, and their units; `secondary[s]` are names that an earlier
    stage counts.
    """

    holding: Holding
    stages: dict[int, Stage] = field(default_factory=dict)
    units: dict[int, list[Unit]] = field(default_factory=dict)
    secondary: dict[int, frozenset[str]] = field(default_factory=dict)
    swaps: dict[int, list[ParameterSwap]] = field(default_factory=dict)

    def strategy(
        self, stage: int, make: Callable[[Sequence[Unit], frozenset[str]], DataStrategy]
    ) -> DataStrategy:
        """What `make` makes of a stage's units, while its own copies of parameters are where its
        modules look for them.
        """
        kept = [(module, key, module._parameters[key]) for module, key, _ in self.swaps[stage]]
        for module, key, param in self.swaps[stage]:
            module._parameters[key] = param
        made = make(self.units[stage], self.secondary[stage])
        for module, key, original in kept:
            module._parameters[key] = original
        return made


@dataclass(frozen=True)
class LayerProducts:
    """How layers multiply: `by` what, where that is `own`; whether they `add` gradients of weights
    where these belong.
    """

    by: Products
    own: bool
    add: bool


def make_stages(
    model: nn.Module,
    blocks: Sequence[str],
    plan: Cut,
    schedule: Schedule,
    *,
    rank: int,
    call: Call,
    products: LayerProducts,
) -> Stages:
    """The stages that `rank` (a coordinate on the pp axis) holds. Parameters have their
    place-holders already.
    """
    own = schedule.stages(rank)
    shapes, buffers = shapes_of(model)
    units = data.split_units(model, blocks)
    params = _params_by_stage(model, plan, own)
    swaps = _swaps(model, params)
    replay = Replay(plan.flow, plan.stage_of) if plan.flow is not None else None
    held: dict[str, nn.Parameter] = {}
    copies: dict[str, list[nn.Parameter]] = {}
    made = Stages(Holding(model, held, shapes, frozenset()))
    for stage in own:
        modules = {
            module for name in plan.links[stage] for module in model.get_submodule(name).modules()
        }
        store = WeightGradStore(products.by) if products.own else None
        if store is not None:
            store.install(modules, quicker_only=not products.add)
        local = params[stage]
        made.swaps[stage] = [swap for swap in swaps[stage] if swap[0] in modules]
        made.stages[stage] = Stage(
            _module(model, plan, stage, swaps=swaps[stage], replay=replay, call=call), stage, store
        )
        made.secondary[stage] = frozenset(name for name in local if plan.holders(name)[0] < stage)
        tied = frozenset(name for name in local if len(plan.holders(name)) > 1)
        made.units[stage] = stage_units(units, local, tied, modules)
        for name in local.keys() & held.keys():
            if not local[name].requires_grad:
                copies.setdefault(name, []).append(local[name])
        held.update({name: param for name, param in local.items() if name not in held})
    if replay is not None:
        replay.install(model)
    secondary = frozenset(name for name in held if plan.holders(name)[0] not in own)
    made.holding = Holding(
        model, held, shapes, _buffers(model, plan, own, buffers), secondary, copies=copies
    )
    return made


def _params_by_stage(
    model: nn.Module, plan: Cut, own: Sequence[int]
) -> dict[int, dict[str, nn.Parameter]]:
    """The parameters of each own stage; those that an earlier own stage uses too, in a copy."""
    params = dict(model.named_parameters())
    taken: set[str] = set()
    found: dict[int, dict[str, nn.Parameter]] = {}
    for stage in own:
        found[stage] = {}
        for name, param in params.items():
            if name in plan.params[stage]:
                found[stage][name] = (
                    nn.Parameter(param.data, requires_grad=param.requires_grad)
                    if name in taken
                    else param
                )
        taken |= plan.params[stage]
    return found


def _swaps(
    model: nn.Module, params: Mapping[int, Mapping[str, nn.Parameter]]
) -> dict[int, list[ParameterSwap]]:
    """Where the parameters of each stage go whose other copies are on this rank too."""
    several = {
        name
        for stage in params.values()
        for name in stage
        if sum(name in other for other in params.values()) > 1
    }
    name_of = {id(param): name for name, param in model.named_parameters() if name in several}
    places = [
        (name_of[id(there)], module, key)
        for module in model.modules()
        for key, there in module._parameters.items()
        if id(there) in name_of
    ]
    return {
        stage: [(module, key, local[name]) for name, module, key in places if name in local]
        for stage, local in params.items()
    }


def _module(
    model: nn.Module,
    plan: Cut,
    stage: int,
    *,
    swaps: list[ParameterSwap],
    replay: Replay | None,
    call: Call,
) -> StageModule:
    links = [(name, model.get_submodule(name)) for name in plan.links[stage]]
    if plan.num_stages == 1:
        return WholeModel(model, call)
    if replay is not None:
        return ReplayedStage(lambda inputs: call(model, inputs), replay, stage, swaps)
    modules = {module for _, link in links for module in link.modules()}
    for module, key, param in swaps:  # a link is of one stage, so its copy can stay in place
        if module in modules:
            module._parameters[key] = param
    names = tuple(inspect.signature(type(model).forward).parameters)[1:]
    first = model.get_submodule(plan.links[0][0])
    return ChainStage(links, call, last=stage == plan.num_stages - 1, names=names, first=first)


def stage_units(
    units: Sequence[Unit],
    local: dict[str, nn.Parameter],
    tied: frozenset[str],
    modules: set[nn.Module],
) -> list[Unit]:
    """The units of the whole model, narrowed to one stage; every tied parameter becomes a unit of
    its own.
    """
    found: list[Unit] = []
    for unit in units:
        names = [name for name, _ in unit.params if name in local]
        found += [
            Unit(f"tied {name}", params=[(name, local[name])]) for name in names if name in tied
        ]
        kept = [(name, local[name]) for name in names if name not in tied]
        used = [module for module in unit.modules if module in modules]
        if kept or used:
            found.append(Unit(unit.name, unit.is_block, kept, used))
    return found


def _buffers(
    model: nn.Module, plan: Cut, own: Sequence[int], buffers: frozenset[str]
) -> frozenset[str]:
    """Buffers of the own links; those outside all links are the first stage's."""
    elsewhere = tuple(
        f"{link}."
        for stage, links in enumerate(plan.links)
        if stage not in own
        for link in links
        if plan.num_stages > 1
    )
    here = tuple(f"{link}." if link else "" for stage in own for link in plan.links[stage])
    return frozenset(
        name
        for name in buffers
        if name.startswith(here) or (0 in own and not name.startswith(elsewhere or ("\0",)))
    )
