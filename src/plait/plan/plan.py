"""The Plan: how a model, a batch and a sequence are split over ranks. Frozen, and not read
after build.

It only declares. Its text is the contract with users (`Plan.parse`, `str`). Everything that can be
said about it without a model is said by `check`.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.errors import PlanError
from plait.plan.facts import STRATEGIES
from plait.plan.rules import broken_rules
from plait.plan.terms import Terms
from plait.plan.text import parse_terms, plan_text


@dataclass(frozen=True)
class Plan(Terms):
    """One way to split a training run over `world_size` ranks.

    `micro_batches` (for each step and data rank) 0 asks for the default, and is resolved at once:
    1, or pp when pp > 1.

    >>> plan = Plan.parse("dp2:zero1 pp2 mb8 tp4:2d")
    >>> str(plan), plan.world_size
    ('pp2 tp4:2d dp2:zero1 mb8', 16)
    """

    @staticmethod
    def parse(text: str) -> Plan:
        """The plan that a text means: terms in any order, separated by blanks.

        Raises `PlanError` naming every term that cannot be read. Whether the numbers fit together
        is asked by `check`.
        """
        return Plan(**parse_terms(text))

    def __str__(self) -> str:
        return plan_text(self)

    @property
    def text_with_micro_batches(self) -> str:
        """The text with `mb`, also where that is the default of a schedule."""
        return plan_text(self, shows_micro_batches=True)

    @property
    def world_size(self) -> int:
        """The ranks that the plan needs: pp x dp x cp x tp (`ep` borrows its ranks from dp x
        cp).
        """
        return self.pp.size * self.dp.size * self.cp.size * self.tp.size

    @property
    def optimizer_shards(self) -> int:
        """The parts into which a copy of the optimizer's state is cut: 1 where ranks keep it
        whole.
        """
        sharded = STRATEGIES[self.dp.strategy].shards_optimizer
        return self.dp.shard * self.cp.size if sharded else 1

    def check(self) -> Plan:
        """The plan itself when it keeps every rule that needs no model, batch or machine.

        Raises `PlanError` listing all the rules that it breaks.
        """
        broken = broken_rules(self)
        if broken:
            raise PlanError(_joined(f"plan '{self}' breaks {len(broken)} rules:", broken))
        return self


def _joined(title: str, messages: list[str]) -> str:
    return messages[0] if len(messages) == 1 else "\n  ".join([title, *messages])
