"""The data strategy of one stage's parameters; experts get one of their own, over fewer ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.comm import World
from plait.engine.with_experts import expert_group, separate
from plait.outer import Asynchrony, make_strategy
from plait.parallel.data import Composite, DataGroup, DataStrategy, Unit
from plait.parallel.expert import ExpertSplit
from plait.plan import Plan


@dataclass(frozen=True)
class StrategyMaker:
    """Makes the data strategy of one stage's parameters."""

    plan: Plan
    group: DataGroup
    asynchrony: Asynchrony
    experts: ExpertSplit | None
    world: World

    def __call__(self, units: Sequence[Unit], tied_copies: frozenset[str]) -> DataStrategy:
        group = replace(self.group, tied_copies=tied_copies)
        if self.experts is None:
            return self._over(units, group)
        dense, experts = separate(units, set(self.experts.boxes))
        few = expert_group(self.group, self.world)
        return Composite([self._over(dense, group), self._over(experts, few)])

    def _over(self, units: Sequence[Unit], group: DataGroup) -> DataStrategy:
        return make_strategy(self.plan.dp.strategy, units, group, self.asynchrony)
