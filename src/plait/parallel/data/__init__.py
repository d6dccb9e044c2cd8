"""Split the batch and the optimizer state: the data axis.

Every strategy is one file behind the moments of `strategy.DataStrategy`; `make` is the table from a
plan's word to it. Strategies whose ranks do not step together have drivers in `plait.outer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.errors import PlanError, nearest
from plait.parallel.data.apart import require_apart
from plait.parallel.data.composite import Composite
from plait.parallel.data.elementwise import has_modes, require_elementwise
from plait.parallel.data.replicated import (
    ReplicatedParameters,
    all_reduce_strategy,
    ring_strategy,
    unreduced,
)
from plait.parallel.data.server import ParameterServer
from plait.parallel.data.strategy import (
    DataGroup,
    DataStrategy,
    OptimizerShard,
    Replicas,
    RoundedCopies,
)
from plait.parallel.data.units import Unit, find_blocks, match_blocks, split_units
from plait.parallel.data.zero import zero1, zero2
from plait.parallel.data.zero3 import Zero3
from plait.plan import facts

STRATEGIES: dict[str, Callable[[Sequence[Unit], DataGroup], DataStrategy]] = {
    "allreduce": all_reduce_strategy,
    "ring": ring_strategy,
    "server": ParameterServer,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": Zero3,
}

# Their optimizers see flat shards, so they need one whose update of an element looks at that
# element alone.
ELEMENTWISE_ONLY = frozenset(name for name in STRATEGIES if facts.STRATEGIES[name].elementwise)


def make(name: str, units: Sequence[Unit], group: DataGroup) -> DataStrategy:
    """The strategy that a plan calls `name`, over the parameters of `units`.

    Raises:
        PlanError: no strategy has that name.
    """
    if name not in STRATEGIES:
        raise PlanError(f"no data strategy is called '{name}'; {nearest(name, STRATEGIES)}")
    return STRATEGIES[name](units, group)


__all__ = [
    "ELEMENTWISE_ONLY",
    "STRATEGIES",
    "Composite",
    "DataGroup",
    "DataStrategy",
    "OptimizerShard",
    "Replicas",
    "ReplicatedParameters",
    "RoundedCopies",
    "Unit",
    "find_blocks",
    "has_modes",
    "make",
    "match_blocks",
    "require_apart",
    "require_elementwise",
    "split_units",
    "unreduced",
]
