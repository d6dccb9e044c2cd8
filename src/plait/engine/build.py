"""From a model and a plan to an engine. The order in which parallelisms are applied is
`compose`, read from top to bottom.

After it the plan is not read any more: each room has been handed what concerns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from plait import comm
from plait.cache_folder import cache_folder
from plait.comm import World
from plait.engine import choosing, compiling, eight_bits, graphs, one_pass, recompute, update
from plait.engine.arguments import check_arguments, check_mesh
from plait.engine.around import contexts_of, make_balance, make_splitter
from plait.engine.balance import has_routers
from plait.engine.composition import check_coded, check_composition, check_delayed
from plait.engine.deferral import make_deferral
from plait.engine.engine import Engine
from plait.engine.expected_count import make_expected_count
from plait.engine.fused_layers import compute_by_modules
from plait.engine.groups_of_parts import GroupsOfWholes, has_parts
from plait.engine.guard import Guard, make_guard
from plait.engine.kinds_of_parameters import refuse_parameters
from plait.engine.loss import LossFunction
from plait.engine.loss_modules import LossModules
from plait.engine.loss_parameters import watched
from plait.engine.loss_reads import absent_parameters, original_parameters
from plait.engine.lost_digits import warn_of_lost_digits
from plait.engine.masked_means import MaskedMeanCheck
from plait.engine.optimizer_like import check_apart, check_elementwise, like
from plait.engine.options import Options
from plait.engine.own_backwards import looked_through
from plait.engine.own_modules import own_modules
from plait.engine.parameter_hooks import warn_of_parameter_hooks
from plait.engine.parts import EngineParts, Uncut
from plait.engine.precision import Precision
from plait.engine.shared_memory import refuse_shared_memory
from plait.engine.splitting import (
    block_names,
    cuts_unknown_inputs,
    split_model,
    wrap_blocks,
)
from plait.engine.stages.assemble import make_pipeline, make_timing, schedule_of
from plait.engine.stages.cut import cut_stages, needs_example
from plait.engine.stages.loading import guard_loading
from plait.engine.stages.make_stages import (
    layer_products,
    local_holding,
    local_stages,
    make_parts,
)
from plait.engine.stages.parts_of_layers import guard_whole_parameters
from plait.engine.stages.tied import tied_sums
from plait.engine.stages.whole_model import end_guard
from plait.engine.state.shards import optimizer_shards
from plait.engine.state.values import FullState, prepare
from plait.engine.strategies import (
    as_one,
    asynchrony_of,
    has_one_backward,
    strategy_maker,
)
from plait.engine.time_first import TimeFirst
from plait.engine.unchanged import Unchanged
from plait.engine.update import Update, partial_sums
from plait.engine.weight_modes import check_modes
from plait.engine.whole import whole_matrices
from plait.engine.whole_batch import refuse_whole_batch
from plait.engine.whole_tensors import check_state_whole
from plait.mesh import Mesh
from plait.models.adapters import coded_weights
from plait.models.coded import coded_parts
from plait.models.losses import compiled
from plait.models.parameters import Parameters
from plait.outer import make_driver
from plait.parallel import data
from plait.parallel.data.synced_norms import SyncedNorms
from plait.plan import Plan, check_kept, check_restarts, check_runnable, kept_blocks
from plait.plan.fit import check_aggregate, check_fixed_order, check_messages, check_offload
from plait.values import PyTree

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

    Args:
        model: plain PyTorch. It may be on the meta device: its parameters are then initialised by
            name. No rank holds more of them than the plan gives it.
        plan: a `Plan` or its text.
        loss: `loss(output, targets)` of a micro-batch, whose tensors are (samples, ...). It returns
            `(sum, count)`, both 0-dim, or the mean over the samples (0-dim). A mean over targets
            that are not masked, or over weights, is `(sum, count)`; so is a sum over samples.
        optimizer: makes the optimizer of the parameters that this rank owns, whole or flat
            (numel,). An optimizer of the whole model is rebuilt for them.
        options: the settings that a plan does not have.
        world: the ranks' own if they have one, else torchrun's.

    Errors are raised before anything is allocated. Where only a batch shows how to cut the model,
    `engine.prepare` or the first step cuts it into stages. The checks that follow the cut come
    then.

    Raises:
        PlanError: the plan is wrong, or cannot be run.
        WorldSizeError: the plan has another number of ranks than the world, or other axes.
        ModelError: the model is no module, the loss no function, or sizes do not fit the plan.
        OptimizerError: the optimizer is none, or cannot update shards.
    """
    options = options or Options()
    plan_as_given = plan
    plan = _checked(plan)
    check_arguments(model, loss, optimizer)
    model = compiling.compiled_in_place(model)
    refuse_parameters(model)
    refuse_shared_memory(model)
    norms = SyncedNorms(model, plan)
    refuse_whole_batch(model, plan)
    recompute.check_chosen(plan, options.remat)
    check_offload(plan, offloads=options.offload_activations)
    check_kept(plan, options.keep_gathered)
    check_messages(plan, options.messages)
    check_aggregate(plan, options.aggregate)
    if options.fixed_order:
        check_fixed_order(plan)
    optimizer = _checked_optimizer(optimizer, model, plan)
    guard = make_guard(plan, options)
    world = world or join_world(plan)
    if world.membership is None:
        check_mesh(plan, world)
    options = choosing.chosen_options(options, plan, world)
    if world.membership is not None:
        check_restarts(plan, options.num_servers)
    own_modules(model)
    compute_by_modules(model, plan)
    warn_of_lost_digits(model, plan_as_given)
    compiling.warn_of_compiled(model, plan)
    if plan.tp.size == 1:  # a tensor axis refuses them
        warn_of_parameter_hooks(model, plan)
    make = partial(
        compose,
        model,
        plan,
        norms=norms,
        loss=loss,
        loss_modules=LossModules(loss, model),
        optimizer=optimizer,
        groups=GroupsOfWholes(optimizer, model, plan),
        world=world,
        guard=guard,
    )
    cuts_by_example = plan.pp.size > 1 and needs_example(model, options.cutting)
    if cuts_by_example or cuts_unknown_inputs(model, plan, options):
        return Engine(
            Uncut(plan, world, model, guard, lambda inputs: make(_with_example(options, inputs)))
        )
    return Engine(make(options))


def _checked_optimizer(
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | torch.optim.Optimizer,
    model: nn.Module,
    plan: Plan,
) -> Callable[[Parameters], torch.optim.Optimizer]:
    """The maker of an optimizer that can update what a rank of the plan has of each parameter."""
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = like(optimizer, model)
    needs_whole = getattr(optimizer, "needs_whole", False)
    is_flat = plan.dp.strategy in data.ELEMENTWISE_ONLY
    if has_parts(plan):
        check_apart(optimizer, model, str(plan))
    if (is_flat or plan.tp.size > 1) and not needs_whole:
        check_elementwise(optimizer, model, str(plan), keep_dims=not is_flat)
    check_state_whole(optimizer, plan)
    return optimizer


def _with_example(options: Options, inputs: PyTree) -> Options:
    return replace(options, cutting=replace(options.cutting, example=inputs))


def compose(
    model: nn.Module,
    plan: Plan,
    options: Options,
    *,
    norms: SyncedNorms,
    loss: LossFunction,
    loss_modules: LossModules,
    optimizer: Callable[[Parameters], torch.optim.Optimizer],
    groups: GroupsOfWholes,
    world: World,
    guard: Guard,
) -> EngineParts:
    """Apply each parallelism of a plan that was checked, in their order. Collective."""
    has_zeros = end_guard(model)
    precision = Precision.of(plan, float16=options.float16)
    blocks = block_names(model, options.blocks)
    whole = FullState.of(model, world)
    formats = coded_weights(model)
    check_coded(plan, formats)
    shapes = {name: tuple(model.get_parameter(name).shape) for name in formats}
    originals = original_parameters(model)
    split = split_model(model, plan, options, world)
    wrap_blocks(model, blocks, plan, options, world, layers=split.layers)
    schedule = schedule_of(plan, options)
    cut = cut_stages(model, blocks, schedule, options.cutting, world)
    check_delayed(
        schedule,
        cut,
        experts=has_routers(model),
        clips=options.clip_grad_norm is not None,
    )
    values = prepare(
        model,
        options.seed,
        precision,
        world=world,
        whole=whole,
        originals=split.originals,
        compares=not has_zeros,
    )
    balance = make_balance(model, split, options, world, loss)

    kept = [blocks[index] for index in kept_blocks(plan, options.keep_gathered, len(blocks))]
    stages = local_stages(model, blocks, cut, schedule.stages(world.axis("pp").rank), kept)
    holding = local_holding(model, cut, stages, split.placements)
    coded = coded_parts(formats, shapes, split.placements)
    make_strategy = strategy_maker(
        plan,
        options,
        precision,
        schedule,
        experts=split.experts,
        coded=coded,
        world=world,
        takes_as_computed=has_one_backward(plan, options, precision)
        and one_pass.is_at_hand(world.device, optimizer),
    )
    strategies = {index: stage.strategy(make_strategy) for index, stage in stages.items()}
    if plan.precision == "fp8":
        eight_bits.install(model, blocks, world.device)
    products = layer_products(plan, options, precision, schedule, world)
    parts = make_parts(model, cut, stages, strategies, products, placement=schedule.placement)
    if plan.compile:
        compiling.leave_out(model, blocks)
    values.fill(strategies, holding, coded)
    guard_loading(model, plan)
    guard_whole_parameters(originals, model, str(plan))

    strategy = as_one(strategies)
    matrices = whole_matrices(plan, world, [one for _, one in optimizer_shards(strategy, holding)])
    made_optimizer = groups.checked(
        update.made_optimizer(optimizer, strategy, holding.shapes, matrices),
        [(piece.name, piece.value) for piece in strategy.pieces],
    )
    check_modes(made_optimizer, plan)
    updater = Update(
        strategy,
        made_optimizer,
        clip_grad_norm=options.clip_grad_norm,
        learning_rate=options.learning_rate,
        split=split.layers,
        rounds_sums=options.fixed_order,
        seed=options.seed,
    )
    driver = make_driver(plan.dp.strategy, strategy, updater.make, asynchrony_of(plan, options))
    world.at_close(driver.leave, driver.close)
    contexts = contexts_of(
        split, (model, cut), balance, norms, world, time_first=TimeFirst(model, plan, world)
    )
    own_loss = split.loss(
        watched(
            loss,
            model,
            originals,
            absent_parameters(dict(originals), plan, cut.params[-1], split.placements),
            world,
        )
    )
    own_loss = _checked_loss(own_loss, plan, split.sequence_parts, world)
    pipeline = make_pipeline(parts, schedule, own_loss, contexts, world, wire=options.wire)
    reductions = [
        strategy.reduce,
        *tied_sums(world.axis("pp"), schedule.placement, cut.tied, strategies),
        *partial_sums(strategy, split.layers),
    ]
    timing = make_timing(schedule, pipeline, updater, reductions, world)
    expected_count = make_expected_count(
        loss, updater, driver, timing, plan=plan, aggregate=options.aggregate, world=world
    )
    scale = precision.loss_scale(of_sums=expected_count is None)
    return EngineParts(
        plan=plan,
        world=world,
        model=model,
        strategy=strategy,
        driver=driver,
        split=split.layers,
        measure=split.measure,
        loss_modules=loss_modules,
        update=updater,
        splitter=make_splitter(model, plan, precision, split, world),
        balance=balance,
        pipeline=pipeline,
        timing=timing,
        reductions=reductions,
        holding=holding,
        seed=options.seed,
        scale=scale,
        expected_count=expected_count,
        guard=guard,
        graphs=graphs.make(model, pipeline, strategy, plan, options),
        deferral=make_deferral(
            options, updater, driver, timing, guard=guard, scale=scale, world=world
        ),
        unchanged=Unchanged(model, optimizer, plan, precision),
        has_zeros=has_zeros,
        mean_of_workers=options.aggregate == "mean" and driver.is_synchronous,
    )


def join_world(plan: Plan, silent_seconds: float = 300.0, **place: Any) -> World:
    """The world that torchrun or `plait.launch` has started; for a plan of one rank, this process
    alone. A rank that is silent for `silent_seconds` counts as failed. `place` is of `comm.init`.
    """
    mesh = Mesh.of(plan)
    return comm.init(mesh, timeout_seconds=silent_seconds, measurements=cache_folder(), **place)


def _checked_loss(
    loss: LossFunction, plan: Plan, sequence_parts: int, world: World
) -> LossFunction:
    """A loss of this rank's outputs that is looked at: its masked means, and its own backwards."""
    num_parts = plan.dp.size * plan.micro_batches
    if plan.compile and compiled(loss) is not loss:
        loss = compiled(loss)  # it counts, and compiled kernels are not looked into
    elif num_parts * sequence_parts > 1 and world.worker[0] == 0:
        loss = MaskedMeanCheck(loss, num_parts, sequence_parts)
    return looked_through(loss, plan, world)


def _checked(plan: Plan | str) -> Plan:
    plan = plan if isinstance(plan, Plan) else Plan.parse(plan)
    plan.check()
    check_runnable(plan)
    eight_bits.check(plan)
    check_composition(plan)
    return plan
