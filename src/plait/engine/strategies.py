"""The data strategies of one rank: one for each stage, and experts over ranks of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.comm import World
from plait.engine.axes import data_axis
from plait.engine.options import Options
from plait.engine.precision import Precision
from plait.engine.with_experts import expert_group, separate
from plait.models.coded import CodedWeight
from plait.outer import Asynchrony, make_strategy
from plait.parallel.data import Composite, DataGroup, DataStrategy, Unit
from plait.parallel.data.coded import CodedParameters, separate_coded
from plait.parallel.expert import ExpertSplit
from plait.parallel.pipeline.actions import Kind, Schedule
from plait.plan import Plan
from plait.plan.facts import STRATEGIES


@dataclass(frozen=True)
class StrategyMaker:
    """Makes the data strategy of one stage's parameters."""

    plan: Plan
    group: DataGroup
    asynchrony: Asynchrony
    experts: ExpertSplit | None
    world: World
    coded: Mapping[str, CodedWeight]

    def __call__(self, units: Sequence[Unit], tied_copies: frozenset[str]) -> DataStrategy:
        group = replace(self.group, tied_copies=tied_copies)
        plain, kept_in_codes = separate_coded(units, self.coded) if self.coded else (units, [])
        parts: list[DataStrategy] = []
        if self.experts is None:
            parts.append(self._over(plain, group))
        else:
            dense, experts = separate(plain, set(self.experts.parts))
            few = expert_group(self.group, self.world)
            parts += [self._over(dense, group), self._over(experts, few)]
        if kept_in_codes:
            parts.append(CodedParameters(kept_in_codes, self._coded_group(group), self.coded))
        return parts[0] if len(parts) == 1 else Composite(parts)

    def _coded_group(self, group: DataGroup) -> DataGroup:
        """The ranks that share codes: those that share parameters, else none."""
        if STRATEGIES[self.plan.dp.strategy].zero_stage == 3:
            return group
        return replace(group, shard=self.world.axis(()), replicate=group.axis)

    def _over(self, units: Sequence[Unit], group: DataGroup) -> DataStrategy:
        return make_strategy(self.plan.dp.strategy, units, group, self.asynchrony)


def asynchrony_of(plan: Plan, options: Options) -> Asynchrony:
    """The options of strategies whose ranks do not step together, with the plan's bounds."""
    return replace(options.asynchrony, stale=plan.dp.stale or 0, every=plan.dp.every or 1)


def strategy_maker(
    plan: Plan,
    options: Options,
    precision: Precision,
    schedule: Schedule,
    *,
    experts: ExpertSplit | None,
    coded: Mapping[str, CodedWeight],
    world: World,
    takes_as_computed: bool = False,
) -> StrategyMaker:
    """The maker of this rank's data strategies.

    Gradients are reduced as they come, unless a schedule makes weight gradients apart. With
    `takes_as_computed` one backward makes them, and the update takes them as they are.
    """
    splits_backward = any(action.kind is Kind.WEIGHT_GRAD for action in schedule)
    group = DataGroup(
        axis=data_axis(world),
        shard=data_axis(world, "dp_shard" if plan.dp.replicate > 1 else "dp"),
        replicate=world.axis("dp_replicate"),
        param_dtype=precision.compute,
        master_dtype=precision.master,
        device=world.device,
        offload=plan.dp.offload,
        num_servers=options.num_servers,
        eager=not splits_backward,
        membership=world.membership,
        fixed_order=options.fixed_order,
        one_backward=takes_as_computed and experts is None,
        keeps_gradients=options.cuda_graphs,
    )
    return StrategyMaker(plan, group, asynchrony_of(plan, options), experts, world, coded)


def has_one_backward(plan: Plan, options: Options, precision: Precision) -> bool:
    """Whether one rank makes the gradients of a step by one backward, in less than the masters'
    precision.
    """
    return (
        plan.world_size == 1
        and plan.micro_batches == 1
        and plan.dp.strategy == "allreduce"
        and not plan.dp.offload
        and not options.fixed_order
        and precision.compute != precision.master
    )


def as_one(strategies: Mapping[int, DataStrategy]) -> DataStrategy:
    """The strategies of all stages of this rank as one."""
    parts = list(strategies.values())
    return parts[0] if len(parts) == 1 else Composite(parts)
