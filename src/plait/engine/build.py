"""From a model and a plan to an engine. The order in which parallelisms are applied is
`compose`, read from top to bottom.

After it nobody reads the plan: each room has been handed what concerns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from plait import comm, models
from plait.cluster.products import MEASUREMENTS
from plait.comm import World
from plait.engine import choosing, compiling, recompute, update
from plait.engine.axes import data_axis, within_stage
from plait.engine.balance import Balance
from plait.engine.batch import BatchSplitter, call
from plait.engine.composition import check_composition, check_delayed
from plait.engine.engine import Engine, EngineParts, Uncut
from plait.engine.loss import LossFunction
from plait.engine.optimizer_like import like
from plait.engine.options import Options
from plait.engine.precision import LossScale, Precision
from plait.engine.stages.cut import cut_stages, needs_example
from plait.engine.stages.delayed import Delayed
from plait.engine.stages.make_stages import LayerProducts, make_stages
from plait.engine.stages.pipeline import Part, Pipeline
from plait.engine.stages.tied import TiedSum
from plait.engine.state.values import Whole, prepare
from plait.engine.strategies import StrategyMaker
from plait.engine.update import Parameters, Update
from plait.engine.with_experts import (
    expert_groups,
    make_placer,
    placements,
)
from plait.errors import ModelError, PlanError
from plait.mesh import Mesh
from plait.models.losses import IGNORE, cross_entropy
from plait.outer import make_driver
from plait.parallel import context, data, expert, tensor
from plait.parallel.context import ContextGroup
from plait.parallel.data import Composite, DataGroup, DataStrategy
from plait.parallel.expert import ExpertSplit
from plait.parallel.pipeline import schedules
from plait.parallel.pipeline.actions import Kind, Schedule
from plait.parallel.pipeline.lower import group_weight_grads, joined_weight_grads, lower
from plait.parallel.pipeline.stream import Stream
from plait.parallel.pipeline.transport import Transport
from plait.parallel.pipeline.versions import WeightVersions
from plait.parallel.tensor import TensorGroup, TensorSplit
from plait.plan import Plan, check_restarts, check_runnable
from plait.products import Products

__all__ = ["Options", "build", "compose", "join_world"]


def build(
    model: nn.Module,
    plan: Plan | str,
    *,
    loss: LossFunction,
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | torch.optim.Optimizer,
    options: Options | None = None,
    world: World | None = None,
) -> Engine:
    """Make this rank's engine. Collective: every rank calls it with an equal model and plan.

    `model` may be on the meta device: then its parameters are initialised by name, and no rank
    holds more of them than the plan gives it. `loss(output, targets)` returns `(sum, count)`, or
    the mean over the samples. `optimizer(params)` makes the optimizer of the parameters that this
    rank owns; an optimizer of the whole model is made anew for them. `world` is the ranks' own if
    they have one, else torchrun's.

    Where only a batch shows how to cut the model into stages, that is done by `engine.prepare` or
    the first step, and so are the checks that follow the cut.

    Errors: `PlanError`, `WorldSizeError`, `ModelError`, `OptimizerError`, all before anything is
    allocated.
    """
    options = options or Options()
    plan = _checked(plan)
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = like(optimizer, model)
    if plan.dp.strategy in data.ELEMENTWISE_ONLY:
        make_optimizer = optimizer
        data.require_elementwise(lambda params: make_optimizer(_unnamed(params)), str(plan))

    world = world or join_world(plan)
    options = choosing.settled(options, plan, world)
    if world.crew is not None:
        check_restarts(plan, options.num_servers)
    make = partial(compose, model, plan, loss=loss, optimizer=optimizer, world=world)
    if plan.pp.size > 1 and needs_example(model, options.cutting):
        return Engine(
            Uncut(plan, world, model, lambda inputs: make(_with_example(options, inputs)))
        )
    return Engine(make(options))


def _with_example(options: Options, inputs: Any) -> Options:
    return replace(options, cutting=replace(options.cutting, example=inputs))


def compose(
    model: nn.Module,
    plan: Plan,
    options: Options,
    *,
    loss: LossFunction,
    optimizer: Callable[[Parameters], torch.optim.Optimizer],
    world: World,
) -> EngineParts:
    """Apply each parallelism of a plan that was checked, in their order. Collective."""
    precision = Precision.of(plan, float16=options.float16)
    blocks = _blocks(model, options.blocks)
    sequence = _split_sequences(model, plan, world, options)
    whole = Whole.of(model, world)
    experts = expert.apply(model, expert_groups(world)) if plan.ep > 1 else None
    split = _split_layers(model, plan, world, options)
    balance = Balance.of(model, data_axis(world), sequence, loss)
    if balance is not None and experts is not None:
        balance.placer = make_placer(model, world, options.placing)
    whole = replace(whole, originals=_originals(experts, split))
    if split is not None:
        loss = split.loss(loss, IGNORE if loss is cross_entropy else None)
    _wrap_blocks(model, blocks, plan, options.compile_backend, world.device)
    schedule = _schedule(plan, options)
    stages_of_model = cut_stages(model, blocks, schedule, options.cutting, world)
    check_delayed(
        schedule,
        stages_of_model,
        experts=balance is not None,
        clips=options.clip_grad_norm is not None,
    )
    values = prepare(
        model, options.seed, precision.compute, precision.master, world=world, whole=whole
    )
    if balance is not None:
        balance.use_product(
            model, options.grouped_product, Products(options.linear_product, world.paths)
        )
    axis = world.axis("pp")
    products = _layer_products(plan, schedule, options, precision, world)
    own = make_stages(
        model, blocks, stages_of_model, schedule, rank=axis.rank, call=call, products=products
    )
    if plan.compile:
        compiling.leave_out(model, blocks)
    own.holding = own.holding.split(placements(experts, split))
    asynchrony = replace(options.asynchrony, stale=plan.dp.stale or 0, every=plan.dp.every or 1)
    group = _data_group(plan, world, options, precision, schedule)
    make = StrategyMaker(plan, group, asynchrony, experts, world)
    strategies = {stage: own.strategy(stage, make) for stage in own.stages}
    for stage, part in own.stages.items() if products.add else ():
        part.add_into(strategies[stage].main_grads())
    strategy = _as_one(list(strategies.values()))
    values.fill(strategies, own.holding)
    updater = Update(
        strategy,
        update.make(optimizer, strategy),
        clip_grad_norm=options.clip_grad_norm,
        learning_rate=options.learning_rate,
        split=split,
    )
    driver = make_driver(plan.dp.strategy, strategy, updater.make, asynchrony)
    world.at_close(driver.leave, driver.close)
    transport = Transport(axis, schedule.placement, world.device)
    parts = {stage: Part(own.stages[stage], strategies[stage]) for stage in strategies}
    actions = schedule.ranks[axis.rank]
    pipeline = Pipeline(parts, schedule.num_stages, transport, loss, balance=balance, split=split)
    pipeline.joined = joined_weight_grads(actions)
    return EngineParts(
        plan=plan,
        world=world,
        model=model,
        strategy=strategy,
        driver=driver,
        split=split,
        update=updater,
        splitter=BatchSplitter(
            model,
            plan.micro_batches,
            precision.compute,
            world.device,
            None if sequence is None else sequence.cut,
        ),
        balance=balance,
        actions=actions,
        pipeline=pipeline,
        delayed=_delayed(pipeline, updater, schedule, world),
        tied=TiedSum(axis, schedule.placement, stages_of_model.tied, strategies),
        holding=own.holding,
        seed=options.seed,
        scale=LossScale() if precision.scaled else None,
        mean_of_workers=options.aggregate == "mean" and driver.is_synchronous,
    )


def _schedule(plan: Plan, options: Options) -> Schedule:
    """The plan's, or the user's own; with all that a runtime needs, unless it is a stream, which is
    cut into steps first.
    """
    if options.schedule is not None:
        schedule = schedules.adopt(options.schedule, plan.pp.size, plan.micro_batches)
    else:
        schedule = schedules.make(
            plan.pp.schedule, plan.pp.size, plan.micro_batches, plan.pp.virtual
        )
    return (
        schedule
        if schedule.asynchronous
        else lower(group_weight_grads(schedule, options.weight_grad_group))
    )


def join_world(plan: Plan, hang_seconds: float = 300.0) -> World:
    """The world that torchrun or `plait.launch` has started; for a plan of one rank, this process
    alone. A rank that is silent for `hang_seconds` counts as failed.
    """
    return comm.init(Mesh.of(plan), timeout_seconds=hang_seconds, measurements=MEASUREMENTS)


def _checked(plan: Plan | str) -> Plan:
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    plan.check()
    check_runnable(plan)
    check_composition(plan)
    return plan


def _unnamed(params: Sequence[nn.Parameter]) -> Parameters:
    return Parameters([(f"parameter {index}", param) for index, param in enumerate(params)])


def _blocks(model: nn.Module, pattern: str | None) -> list[str]:
    if pattern is None:
        return data.find_blocks(model)
    blocks = data.match_blocks(model, pattern)
    if not blocks:
        names = [name for name, _ in model.named_children()]
        raise ModelError(
            f"no module matches blocks = '{pattern}'; the model's children are {', '.join(names)}"
        )
    return blocks


def _split_sequences(
    model: nn.Module, plan: Plan, world: World, options: Options
) -> ContextGroup | None:
    """Replace attention by its context-parallel form, if the plan splits sequences."""
    if plan.cp.size == 1:
        return None
    roles = models.roles_for(model) if options.roles is None else options.roles
    named = {
        name: role
        for name, _ in model.named_modules()
        if (role := models.role(name, roles)) is not None
    }
    return context.apply(model, named, world.axis("cp"), plan.cp.strategy)


def _as_one(strategies: list[DataStrategy]) -> DataStrategy:
    return strategies[0] if len(strategies) == 1 else Composite(strategies)


def _data_group(
    plan: Plan, world: World, options: Options, precision: Precision, schedule: Schedule
) -> DataGroup:
    return DataGroup(
        axis=data_axis(world),
        shard=data_axis(world, "dp_shard" if plan.dp.replicate > 1 else "dp"),
        replicate=world.axis("dp_replicate"),
        param_dtype=precision.compute,
        master_dtype=precision.master,
        device=world.device,
        offload=plan.dp.offload,
        num_servers=options.num_servers,
        eager=not any(action.kind is Kind.WEIGHT_GRAD for action in schedule),
        crew=world.crew,
    )


def _split_layers(
    model: nn.Module, plan: Plan, world: World, options: Options
) -> TensorSplit | None:
    """Replace the model's modules by their tensor-parallel forms, if the plan splits layers."""
    if plan.tp.size == 1 and plan.tp.mode == "1d":
        return None
    if options.aggregate == "mean" and plan.tp.mode != "1d":
        raise PlanError(
            f"aggregate 'mean' weighs whole batches, and {plan.tp} splits the batch of a data rank; use 'sum'"
        )
    roles = models.roles_for(model) if options.roles is None else options.roles
    products = Products("torch" if plan.compile else options.linear_product, world.paths)
    group = TensorGroup(
        world, plan.tp.mode, plan.tp.sequence_parallel, str(plan.tp), products=products
    )
    return tensor.apply(model, roles, group)


def _layer_products(
    plan: Plan, schedule: Schedule, options: Options, precision: Precision, world: World
) -> LayerProducts:
    """A pipeline's layers add their weights' gradients themselves, which a backward that is split
    needs.
    """
    pipelined = schedule.num_stages > 1
    split = any(action.kind is Kind.WEIGHT_GRAD for action in schedule)
    by = Products(options.linear_product, world.paths)
    compiles = plan.compile
    add = split or (pipelined and not compiles)
    return LayerProducts(
        by, own=add or (not compiles and by.serves(precision.compute, world.device)), add=add
    )


def _wrap_blocks(
    model: nn.Module, blocks: Sequence[str], plan: Plan, backend: str, device: torch.device
) -> None:
    """What is kept of single operations is decided inside a graph; a block that is forgotten as a
    whole is one around it.
    """
    if plan.remat == "selective":
        recompute.apply(model, blocks, plan.remat)
    if plan.compile:
        compiling.apply(
            model, blocks, backend=backend, device=device, as_one=plan.remat == "selective"
        )
    if plan.remat == "full":
        recompute.apply(model, blocks, plan.remat)


def _originals(experts: ExpertSplit | None, split: TensorSplit | None) -> dict[str, nn.Module]:
    """The modules that can make whole values; those of experts as they were before either split."""
    return {
        **({} if split is None else split.originals),
        **({} if experts is None else experts.originals),
    }


def _delayed(
    pipeline: Pipeline, updater: Update, schedule: Schedule, world: World
) -> Delayed | None:
    """What an asynchronous schedule needs beside the stages; None for the others."""
    if not schedule.asynchronous:
        return None
    axis = world.axis("pp")
    m = schedule.num_micro_batches
    strategy: Any = next(iter(pipeline.parts.values())).strategy
    versions = WeightVersions(strategy, 1 if schedule.delay is None else m, schedule.delay)
    stream = Stream(schedule.name, axis.size, m, axis.rank)
    return Delayed(pipeline, updater, stream, versions, axes=(within_stage(world), axis))
