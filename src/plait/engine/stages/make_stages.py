"""The stages of one rank, made from a cut: their modules, their parameters' units, copies of tied
parameters.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from plait.comm import World
from plait.engine.batch import arguments, call
from plait.engine.options import Options
from plait.engine.precision import Precision
from plait.engine.stages.cut import StagePartition
from plait.engine.stages.pipeline import StageWithStrategy
from plait.engine.stages.whole_model import guard
from plait.engine.stages.written_after_read import WrittenAfterRead
from plait.engine.state.local_parameters import LocalParameters, shapes_of
from plait.parallel import data
from plait.parallel.data import DataStrategy, Unit
from plait.parallel.pipeline.actions import Kind, Schedule
from plait.parallel.pipeline.elsewhere import LinkAttributes
from plait.parallel.pipeline.module_hooks import check_backward_hooks
from plait.parallel.pipeline.replayed import (
    ParameterSwap,
    Replay,
    ReplayedStage,
)
from plait.parallel.pipeline.stage import ChainStage, Stage, StageModule, WholeModel
from plait.parallel.pipeline.uncuttable import check_draws, check_objects, check_states
from plait.parallel.pipeline.weight_grad_store import GradAccumulator, WeightGradStore
from plait.parallel.tensor import Placement
from plait.plan import Plan
from plait.products import Products


@dataclass(frozen=True)
class LocalStage:
    """One stage of this rank before it runs: its modules and parameters.

    Attributes:
        index: number of the stage.
        modules: the modules that only this stage runs.
        params: the parameters that it uses, by name.
        units: the units of its parameters, for a data strategy.
        tied_copies: names of parameters that an earlier stage counts.
        swaps: where its parameters go whose other copies are on this rank too.
    """

    index: int
    modules: frozenset[nn.Module]
    params: Mapping[str, nn.Parameter]
    units: Sequence[Unit]
    tied_copies: frozenset[str]
    swaps: Sequence[ParameterSwap]

    def strategy(
        self, make: Callable[[Sequence[Unit], frozenset[str]], DataStrategy]
    ) -> DataStrategy:
        """Make the data strategy while this stage's copies are where its modules look for them."""
        swaps = [swap for swap in self.swaps if swap[0] in self.modules]
        originals = [(module, key, module._parameters[key]) for module, key, _ in swaps]
        for module, key, param in swaps:
            module._parameters[key] = param
        strategy = make(self.units, self.tied_copies)
        for module, key, original in originals:
            module._parameters[key] = original
        return strategy


@dataclass(frozen=True)
class LayerProducts:
    """How linear layers multiply.

    Attributes:
        products: the libraries to choose from.
        replaced: layers run through `products`, not through their own forward.
        accumulates: layers add their weight gradients to the main gradients themselves, where that
            is quicker.
        splits: the schedule has weight gradients as actions of their own.
    """

    products: Products
    replaced: bool
    accumulates: bool
    splits: bool

    def weight_grad_store(
        self, modules: Collection[nn.Module], main_grads: Mapping[int, GradAccumulator]
    ) -> WeightGradStore | None:
        """Let the layers among `modules` run through these products; None where they do not."""
        if not self.replaced:
            return None
        store = WeightGradStore(self.products, main_grads if self.accumulates else {})
        store.install(modules, quicker_only=not self.splits)
        return store


def layer_products(
    plan: Plan, options: Options, precision: Precision, schedule: Schedule, world: World
) -> LayerProducts:
    """How the layers of a plan multiply, and which add their weight gradients themselves."""
    splits_backward = any(action.kind is Kind.WEIGHT_GRAD for action in schedule)
    products = Products(options.linear_product, world.paths)
    accumulates = splits_backward or (schedule.num_stages > 1 and not plan.compile)
    is_faster = not plan.compile and products.supports(precision.compute, world.device)
    return LayerProducts(
        products,
        replaced=accumulates or is_faster,
        accumulates=accumulates,
        splits=splits_backward,
    )


def local_stages(
    model: nn.Module,
    blocks: Sequence[str],
    cut: StagePartition,
    indices: Sequence[int],
    kept: Collection[str] = (),
) -> dict[int, LocalStage]:
    """The stages `indices` of a model whose parameters have their place-holders already.

    `kept` are the names of the blocks that ZeRO-3 keeps whole once they are gathered.
    """
    units = data.split_units(model, blocks, kept)
    params = _params_by_stage(model, cut, indices)
    swaps = _swaps(model, params)
    stages = {}
    for index in indices:
        names = cut.links[index]
        modules = {module for name in names for module in model.get_submodule(name).modules()}
        local = params[index]
        tied = frozenset(name for name in local if len(cut.holders(name)) > 1)
        stages[index] = LocalStage(
            index,
            frozenset(modules),
            local,
            stage_units(units, local, tied, modules, _holders(model, modules)),
            tied_copies=frozenset(name for name in local if cut.holders(name)[0] < index),
            swaps=swaps[index],
        )
    return stages


def local_holding(
    model: nn.Module,
    cut: StagePartition,
    stages: Mapping[int, LocalStage],
    placements: Mapping[str, Placement],
) -> LocalParameters:
    """The parameters and buffers of all stages of this rank."""
    shapes, buffers = shapes_of(model)
    shapes.update({name: placement.shape for name, placement in placements.items()})
    params: dict[str, nn.Parameter] = {}
    copies: dict[str, list[nn.Parameter]] = {}
    for stage in stages.values():
        for name, param in stage.params.items():
            if name not in params:
                params[name] = param
            elif not param.requires_grad:
                copies.setdefault(name, []).append(param)
    return LocalParameters(
        model,
        params,
        shapes,
        _buffers(model, cut, list(stages), buffers),
        tied_copies=frozenset(name for name in params if cut.holders(name)[0] not in stages),
        placements=placements,
        copies=copies,
    )


def make_parts(
    model: nn.Module,
    cut: StagePartition,
    stages: Mapping[int, LocalStage],
    strategies: Mapping[int, DataStrategy],
    products: LayerProducts,
    *,
    placement: Sequence[int],
) -> dict[int, StageWithStrategy]:
    """The stages of this rank, ready to run. Replaces forwards of the model's modules.

    `placement` has the rank of each stage.
    """
    replay = None
    if cut.flow is not None:
        check_backward_hooks(model, cut.flow, cut.stage_of)
        check_draws(cut.flow, cut.stage_of)
        check_objects(cut.flow, cut.stage_of)
        check_states(cut.flow, cut.stage_of)
        replay = Replay(cut.flow, cut.stage_of, model)
    here = [name for index in stages for name in cut.links[index]]
    parts = {}
    for index, stage in stages.items():
        strategy = strategies[index]
        store = products.weight_grad_store(stage.modules, strategy.main_grads())
        module = _stage_module(model, cut, stage, replay, here=here, device=strategy.group.device)
        parts[index] = StageWithStrategy(Stage(module, index, store), strategy)
    if replay is not None:
        replay.install(stages)
    reads = WrittenAfterRead(model)
    if replay is not None and cut.num_stages > 1:
        replay.begins, replay.ends = reads.begin, reads.end
    guard(
        model,
        cut.num_stages,
        lambda: replay is not None and replay.running is not None,
        _elsewhere(model, cut, stages, placement),
        reads,
    )
    return parts


def _elsewhere(
    model: nn.Module,
    cut: StagePartition,
    stages: Mapping[int, LocalStage],
    placement: Sequence[int],
) -> dict[str, str]:
    """The places of the parameters that no stage of this rank uses, by name."""
    here = {id(param) for stage in stages.values() for param in stage.params.values()}
    first = {
        name: cut.holders(name)[0]
        for name, param in model.named_parameters()
        if id(param) not in here
    }
    return {
        name: f"stage {stage} of {cut.num_stages}, on rank {placement[stage]} of pp"
        for name, stage in first.items()
    }


def _params_by_stage(
    model: nn.Module, plan: StagePartition, own: Sequence[int]
) -> dict[int, dict[str, nn.Parameter]]:
    """The parameters of each own stage; those that an earlier own stage uses too, in a copy."""
    params = dict(model.named_parameters())
    seen: set[str] = set()
    by_stage: dict[int, dict[str, nn.Parameter]] = {}
    for stage in own:
        by_stage[stage] = {}
        for name, param in params.items():
            if name in plan.params[stage]:
                own_param = param
                if name in seen:
                    own_param = nn.Parameter(param.data, requires_grad=param.requires_grad)
                    vars(own_param).update(vars(param))
                by_stage[stage][name] = own_param
        seen |= plan.params[stage]
    return by_stage


def _swaps(
    model: nn.Module, params: Mapping[int, Mapping[str, nn.Parameter]]
) -> dict[int, list[ParameterSwap]]:
    """Where the parameters of each stage go whose other copies are on this rank too."""
    copies = Counter(chain.from_iterable(params.values()))
    name_of = {id(param): name for name, param in model.named_parameters() if copies[name] > 1}
    places = [
        (name_of[id(there)], module, key)
        for module in model.modules()
        for key, there in module._parameters.items()
        if id(there) in name_of
    ]
    swaps: dict[int, list[ParameterSwap]] = {}
    for stage, local in params.items():
        swaps[stage] = [(module, key, local[name]) for name, module, key in places if name in local]
    return swaps


def _stage_module(
    model: nn.Module,
    cut: StagePartition,
    stage: LocalStage,
    replay: Replay | None,
    *,
    here: Sequence[str],
    device: torch.device,
) -> StageModule:
    names = cut.links[stage.index]
    if cut.num_stages == 1:
        return WholeModel(model, arguments)
    if replay is not None:
        return ReplayedStage(
            lambda inputs: call(model, inputs),
            replay,
            stage.index,
            list(stage.swaps),
            device=device,
        )
    for module, key, param in stage.swaps:  # a link is of one stage, so its copy can stay in place
        if module in stage.modules:
            module._parameters[key] = param
    return ChainStage(
        [(name, model.get_submodule(name)) for name in names],
        call,
        last=stage.index == cut.num_stages - 1,
        attributes=LinkAttributes(model, names, here),
        names=tuple(inspect.signature(type(model).forward).parameters)[1:],
        first=model.get_submodule(cut.links[0][0]),
    )


def stage_units(
    units: Sequence[Unit],
    local: dict[str, nn.Parameter],
    tied: frozenset[str],
    modules: set[nn.Module],
    holders: Mapping[str, Sequence[nn.Module]],
) -> list[Unit]:
    """The units of the whole model, narrowed to one stage; every tied parameter becomes a unit of
    its own. `holders`: of each parameter, the modules that have it and are no links of the stage.
    """
    narrowed: list[Unit] = []
    for unit in units:
        names = [name for name, _ in unit.params if name in local]
        narrowed += [
            Unit(f"tied {name}", params=[(name, local[name])]) for name in names if name in tied
        ]
        kept = [(name, local[name]) for name in names if name not in tied]
        used = [module for module in unit.modules if module in modules]
        if kept or used:
            narrowed.append(Unit(unit.name, unit.is_block, kept, used, unit.keep))
    for unit in narrowed:
        unit.holders += dict.fromkeys(
            module for name, _ in unit.params for module in holders.get(name, ())
        )
    return narrowed


def _holders(model: nn.Module, modules: set[nn.Module]) -> dict[str, list[nn.Module]]:
    """The modules outside of `modules` that have a parameter, by its name in the model."""
    name_of = {id(param): name for name, param in model.named_parameters()}
    holders: dict[str, list[nn.Module]] = {}
    for module in model.modules():
        if module not in modules:
            for param in module.parameters(recurse=False):
                holders.setdefault(name_of[id(param)], []).append(module)
    return holders


def _buffers(
    model: nn.Module, plan: StagePartition, own: Sequence[int], buffers: frozenset[str]
) -> frozenset[str]:
    """Buffers of the stage's links; those outside all links are the first stage's."""
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
