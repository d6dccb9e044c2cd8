"""`[plan] shares`: parts of the global batch by data rank, for ranks that are not equally fast.

The loss is a mean over the global count, so uneven parts are exact. What needs whole numbers is the
cut: every data rank has equally many micro-batches, each with the rank's own number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from plait.errors import PlanError
from plait.plan.facts import STRATEGIES
from plait.plan.plan import Plan


def whole_shares(shares: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the ratio of the shares: [1.5, 0.5] is (3, 1)."""
    parts = [Fraction(str(share)) for share in shares]
    scale = math.lcm(*(part.denominator for part in parts))
    whole = [int(part * scale) for part in parts]
    divisor = math.gcd(*whole)
    return tuple(part // divisor for part in whole)


def shares_text(shares: Sequence[float]) -> str:
    """The list as a config has it: `[3, 1]`."""
    return f"[{', '.join(f'{share:g}' for share in shares)}]"


def shares_of(plan: Plan, shares: Sequence[float] | None) -> tuple[int, ...]:
    """The shares under a plan, as whole numbers; all 1 where none are given or no axis needs them.

    Raises `PlanError` for shares that are not one number for each data rank, and for ranks that do
    not step together.
    """
    size = plan.dp.size
    if not shares or size == 1:
        return (1,) * size
    setting = f"plan '{plan}': plan.shares {shares_text(shares)}"
    if len(shares) != size:
        raise PlanError(
            f"{setting} has {len(shares)} numbers and dp{size} needs {size}; give one for each "
            "data rank, or leave shares out"
        )
    if len(set(shares)) > 1 and not STRATEGIES[plan.dp.strategy].synchronous:
        raise PlanError(
            f"{setting} needs ranks that step together, and those of {plan.dp} do not; take "
            f"dp{size} or dp{size}:zero1, or leave shares out"
        )
    return whole_shares(shares)


def check_shares(plan: Plan, shares: Sequence[float] | None, global_batch: int) -> None:
    """Raises `PlanError` unless each micro-batch of a data rank has exactly its share."""
    parts = shares_of(plan, shares)
    if len(set(parts)) == 1:
        return
    total = sum(parts)
    unit = total * plan.micro_batches
    if global_batch % unit == 0:
        return
    below = global_batch // unit * unit
    nearest = f"the nearest are {below} and {below + unit}"
    if not below:
        nearest = f"the least is {unit}"
    raise PlanError(
        f"plan '{plan}': global_batch {global_batch} must be a multiple of {unit}, the sum "
        f"{total} of plan.shares {shares_text(parts)} x mb{plan.micro_batches}; {nearest}"
    )
