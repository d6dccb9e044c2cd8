"""The data strategy of one stage's parameters; experts get one of their own, over fewer ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait import data
from plait.comm import World
from plait.data import DataGroup, DataStrategy, Unit
from plait.engine.with_experts import WithExperts, expert_group, separate
from plait.expert import ExpertSplit
from plait.pipeline.actions import Kind, Schedule
from plait.plan import Plan


@dataclass(frozen=True)
class StrategyMaker:
    """Makes the data strategy of one stage's parameters."""

    plan: Plan
    group: DataGroup
    schedule: Schedule
    experts: ExpertSplit | None
    world: World

    def __call__(self, units: Sequence[Unit], secondary: frozenset[str]) -> DataStrategy:
        if self.experts is None:
            return self._over(units, self.group, secondary)
        dense, experts = separate(units, set(self.experts.boxes))
        group = expert_group(self.group, self.world)
        return WithExperts(
            self._over(dense, self.group, secondary), self._over(experts, group, frozenset())
        )

    def _over(
        self, units: Sequence[Unit], group: DataGroup, secondary: frozenset[str]
    ) -> DataStrategy:
        strategy = data.make(self.plan.dp.strategy, units, group)
        strategy.secondary = secondary
        strategy.collector.eager = not any(
            action.kind is Kind.WEIGHT_GRAD for action in self.schedule
        )
        return strategy
