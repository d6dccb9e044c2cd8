"""The smallest plan that still fails, found with as few runs as possible.

A plan is taken as its ingredients (an axis, micro-batches, an option). Delta debugging (ddmin, in
Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002) keeps a failing
set of them from which none can be removed. Then each strategy left is replaced by the plain one of
its axis, which tells an axis from its strategy. Pure: it only calls `fails`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from plait.errors import PlanError
from plait.plan import ContextAxis, DataAxis, PipelineAxis, Plan, TensorAxis
from plait.plan.facts import PLAIN_SCHEDULE


@dataclass(frozen=True)
class FailingSet:
    """The outcome. `smallest` fails, and nothing can be taken from it.

    `ingredients` are its axes and options (`dp`, `mb`, `remat`). `strategies` are those axes whose
    plain strategy passes, so the strategy is to blame and not the axis. `tried` are the plans that
    were run, with whether they failed.
    """

    smallest: Plan
    ingredients: tuple[str, ...]
    strategies: tuple[str, ...] = ()
    tried: tuple[tuple[str, bool], ...] = field(default=())

    def text(self) -> str:
        """One sentence for the report."""
        if not self.ingredients:
            return "one device fails by itself: no axis is to blame, but what every plan shares"
        named = [
            f"{axis} ({self._strategy(axis)})" if axis in self.strategies else axis
            for axis in self.ingredients
        ]
        blamed = " with ".join(named)
        return (
            f"the smallest plan that fails is '{self.smallest}': to blame is {blamed} "
            f"({len(self.tried)} plans tried)"
        )

    def _strategy(self, axis: str) -> str:
        return {
            "dp": self.smallest.dp.strategy,
            "tp": self.smallest.tp.mode,
            "pp": self.smallest.pp.schedule,
        }.get(axis, axis)


# Each ingredient takes itself from a plan; one that changes nothing is not an ingredient of that
# plan.
REMOVE: dict[str, Callable[[Plan], Plan]] = {
    "dp": lambda plan: replace(plan, dp=DataAxis()),
    "tp": lambda plan: replace(plan, tp=TensorAxis()),
    "pp": lambda plan: replace(plan, pp=PipelineAxis(), micro_batches=plan.micro_batches),
    "ep": lambda plan: replace(plan, ep=1),
    "cp": lambda plan: replace(plan, cp=ContextAxis()),
    "mb": lambda plan: replace(plan, micro_batches=1),
    "remat": lambda plan: replace(plan, remat="none"),
    "compile": lambda plan: replace(plan, compile=False),
}

# The plain strategy of an axis, tried once the axes are known.
PLAIN: dict[str, Callable[[Plan], Plan]] = {
    "dp": lambda plan: replace(plan, dp=DataAxis(plan.dp.size)),
    "tp": lambda plan: replace(plan, tp=TensorAxis(plan.tp.size)),
    "pp": lambda plan: replace(plan, pp=PipelineAxis(plan.pp.size, PLAIN_SCHEDULE)),
}


def ingredients(plan: Plan) -> tuple[str, ...]:
    """The axes and options by which a plan differs from one device."""
    return tuple(name for name, remove in REMOVE.items() if remove(plan) != plan)


def without(plan: Plan, names: Sequence[str]) -> Plan:
    """The plan without these ingredients."""
    for name in names:
        plan = REMOVE[name](plan)
    return plan


def bisect(plan: Plan, fails: Callable[[Plan], bool]) -> FailingSet:
    """The smallest failing part of a plan that fails; `fails(plan)` runs one. A plan that cannot
    run counts as passing.
    """
    trial = _Trial(plan, ingredients(plan), fails)
    needed = trial.minimise() if trial.names and not trial.keeps(()) else ()
    smallest = without(plan, [name for name in trial.names if name not in needed])
    guilty = []
    for axis in needed:
        plainer = PLAIN.get(axis, lambda same: same)(smallest)
        if plainer != smallest:
            if trial.failing(plainer):
                smallest = plainer
            else:
                guilty.append(axis)
    return FailingSet(smallest, tuple(needed), tuple(guilty), tuple(trial.seen.items()))


@dataclass
class _Trial:
    plan: Plan
    names: tuple[str, ...]
    fails: Callable[[Plan], bool]
    seen: dict[str, bool] = field(default_factory=dict)

    def failing(self, plan: Plan) -> bool:
        """Run a plan once; the second question is answered from memory."""
        text = str(plan)
        if text not in self.seen:
            try:
                self.seen[text] = plan == self.plan or self.fails(plan.check())
            except PlanError:
                self.seen[text] = False
        return self.seen[text]

    def keeps(self, kept: Sequence[str]) -> bool:
        """Whether the plan still fails with only these ingredients."""
        return self.failing(without(self.plan, [name for name in self.names if name not in kept]))

    def minimise(self) -> tuple[str, ...]:
        """ddmin over the ingredients: try parts, then complements, then finer parts."""
        needed = self.names
        parts = 2
        while len(needed) > 1:
            size = max(len(needed) // parts, 1)
            chunks = [needed[i : i + size] for i in range(0, len(needed), size)]
            rests = (
                [tuple(name for name in needed if name not in chunk) for chunk in chunks]
                if len(chunks) > 2
                else []
            )
            smaller = next(
                (
                    one
                    for one in [*chunks, *rests]
                    if one and len(one) < len(needed) and self.keeps(one)
                ),
                None,
            )
            if smaller is not None:
                needed = smaller
                parts = 2
            elif size == 1:
                break
            else:
                parts = min(parts * 2, len(needed))
        return tuple(needed)
