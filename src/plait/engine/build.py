"""From a model and a plan to an engine. The order in which parallelisms are applied is `build`, read from top to bottom.

After it nobody reads the plan: each room has been handed what concerns it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait import comm, context, data, models
from plait.comm import Axis, World
from plait.context import ContextGroup
from plait.data import DataGroup, DataStrategy, Unit
from plait.engine import recompute, update
from plait.engine.axes import data_axis
from plait.engine.balance import Balance
from plait.engine.batch import BatchSplitter
from plait.engine.engine import Engine, EngineParts
from plait.engine.init import Initializer, buffer_dtype, is_meta, place_holders
from plait.engine.loss import LossFunction
from plait.engine.update import LearningRate, Parameters, Update
from plait.errors import ModelError
from plait.mesh import Mesh
from plait.pipeline import schedules
from plait.pipeline.actions import Action
from plait.pipeline.lower import lower
from plait.plan import Plan, check_available

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}
MASTER_DTYPES = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Options:
    """What a plan does not say.

    Attributes:
        seed: of the initial values (by name) and of dropout (by step and micro-batch).
        blocks: pattern of the model's repeated blocks, as `layers.*`; found by structure where it is None.
        roles: from module pattern to role; None takes the model's own table.
        clip_grad_norm: the largest norm of the gradient; None does not clip.
        learning_rate: factor on the optimizer's lr by step, from 0.
        num_servers: ranks that serve under `dpN:server`; None means all.
        aggregate: what servers make of the workers' gradients: `sum` (the global mean loss) or `mean` (the mean of the
            workers' means; the same where every worker counts as many tokens).
    """

    seed: int = 0
    blocks: str | None = None
    roles: Mapping[str, str] | None = None
    clip_grad_norm: float | None = None
    learning_rate: LearningRate | None = None
    num_servers: int | None = None
    aggregate: str = "sum"


def build(
    model: nn.Module,
    plan: Plan | str,
    *,
    loss: LossFunction,
    optimizer: Callable[[Parameters], torch.optim.Optimizer],
    options: Options | None = None,
    world: World | None = None,
) -> Engine:
    """Make this rank's engine. Collective: every rank calls it with an equal model and plan.

    `model` may be on the meta device: then its parameters are initialised by name, and no rank holds more of them than the
    plan gives it. `loss(output, targets)` returns `(sum, count)`, or the mean over the samples. `optimizer(params)` makes
    the optimizer of the parameters that this rank owns. `world` is the ranks' own if they have one, else torchrun's.

    Errors: `PlanError`, `WorldSizeError`, `ModelError`, `OptimizerError`, all before anything is allocated.
    """
    options = options or Options()
    plan = _checked(plan)
    if plan.dp.strategy in data.ELEMENTWISE_ONLY:
        data.require_elementwise(lambda params: optimizer(_unnamed(params)), str(plan))

    world = world or join_world(plan)
    blocks = _blocks(model, options.blocks)
    sequence = _split_sequences(model, plan, world, options)
    balance = Balance.of(model, data_axis(world), sequence, loss)
    recompute.apply(model, blocks, plan.remat)
    units = _materialise(model, blocks, plan, world, options)
    strategy = data.make(plan.dp.strategy, units.units, _data_group(plan, world, options))
    units.fill(strategy)

    return Engine(
        EngineParts(
            plan=plan,
            world=world,
            model=model,
            loss=loss,
            strategy=strategy,
            update=Update(
                strategy,
                update.make(optimizer, strategy),
                clip_grad_norm=options.clip_grad_norm,
                learning_rate=options.learning_rate,
            ),
            splitter=BatchSplitter(
                model, plan.micro_batches, DTYPES[plan.precision], world.device, None if sequence is None else sequence.cut
            ),
            balance=balance,
            actions=_actions(plan, world),
            seed=options.seed,
            mean_of_workers=options.aggregate == "mean",
        )
    )


def join_world(plan: Plan) -> World:
    """The world that torchrun or `plait.launch` has started; for a plan of one rank, this process alone."""
    return comm.init(Mesh.of(plan))


def _checked(plan: Plan | str) -> Plan:
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    plan.check()
    check_available(plan)
    return plan


def _unnamed(params: Sequence[nn.Parameter]) -> Parameters:
    return Parameters([(f"parameter {index}", param) for index, param in enumerate(params)])


def _blocks(model: nn.Module, pattern: str | None) -> list[str]:
    if pattern is None:
        return data.find_blocks(model)
    blocks = data.match_blocks(model, pattern)
    if not blocks:
        names = [name for name, _ in model.named_children()]
        raise ModelError(f"no module matches blocks = '{pattern}'; the model's children are {', '.join(names)}")
    return blocks


def _split_sequences(model: nn.Module, plan: Plan, world: World, options: Options) -> ContextGroup | None:
    """Replace attention by its context-parallel form, if the plan splits sequences."""
    if plan.cp.size == 1:
        return None
    roles = models.roles_for(model) if options.roles is None else options.roles
    named = {name: role for name, _ in model.named_modules() if (role := models.role(name, roles)) is not None}
    return context.apply(model, named, world.axis("cp"), plan.cp.strategy)


def _data_group(plan: Plan, world: World, options: Options) -> DataGroup:
    return DataGroup(
        axis=data_axis(world),
        shard=data_axis(world, "dp_shard" if plan.dp.replicate > 1 else "dp"),
        replicate=world.axis("dp_replicate"),
        param_dtype=DTYPES[plan.precision],
        master_dtype=MASTER_DTYPES[plan.precision],
        device=world.device,
        offload=plan.dp.offload,
        num_servers=options.num_servers,
    )


def _actions(plan: Plan, world: World) -> tuple[Action, ...]:
    schedule = schedules.make(plan.pp.schedule, plan.pp.size, plan.micro_batches, plan.pp.virtual)
    return lower(schedule).ranks[world.mesh.coordinate(world.rank, "pp")]


@dataclass
class _Model:
    """A model whose parameters wait for their memory: its units, and where the values come from."""

    units: list[Unit]
    model: nn.Module
    initializer: Initializer | None  # of a meta model
    values: dict[int, Tensor]  # of a model that has its values, by parameter
    axis: Axis

    def fill(self, strategy: DataStrategy) -> None:
        """Give every parameter its value, wherever the strategy keeps it."""
        places = {
            id(state.bucket.slots[index].param): (state, index)
            for state in (*strategy.states, *strategy.frozen_states)
            for index in range(len(state.bucket.slots))
        }

        def take(param: nn.Parameter, value: Tensor) -> None:
            if id(param) in places:
                strategy.write(*places[id(param)], value)
            else:  # frozen, and not sharded by the strategy
                param.data = value.to(param.device, param.dtype, copy=True)

        with torch.no_grad():
            if self.initializer is not None:
                self.initializer.run(take)
            for param in self.model.parameters():
                if id(param) in self.values:
                    value = self.values.pop(id(param)).contiguous()
                    self.axis.broadcast(value, 0).wait()
                    take(param, value)
            strategy.publish()


def _materialise(model: nn.Module, blocks: Sequence[str], plan: Plan, world: World, options: Options) -> _Model:
    dtype, master = DTYPES[plan.precision], MASTER_DTYPES[plan.precision]
    axis = data_axis(world)
    if is_meta(model):
        place_holders(model, dtype, world.device)
        initializer = Initializer(model, options.seed, dtype, world.device)
        return _Model(data.split_units(model, blocks), model, initializer, {}, axis)
    values = {id(param): param.data.to(world.device, master) for param in model.parameters()}
    for param in model.parameters():
        param.data = torch.zeros((), dtype=dtype, device=world.device).expand(param.shape)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(world.device, buffer_dtype(module, key, dtype))
    return _Model(data.split_units(model, blocks), model, None, values, axis)
