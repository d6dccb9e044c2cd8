"""`[plan] keep_gathered`: the blocks whose parameters zero3 gathers once a step, and then keeps.

FSDP2 has this choice for each module as `reshard_after_forward`. A kept block is whole from its
first forward of a step until the step ends. So its backward gathers nothing, and neither do later
micro-batches. It takes the memory of its whole parameters for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from plait.errors import PlanError
from plait.plan.facts import STRATEGIES
from plait.plan.plan import Plan

KeepGathered = Literal["auto"] | int | tuple[int, ...] | None
"""The last blocks by their number, or blocks by their numbers from 0, or the planner's choice."""


def gathers_layers(plan: Plan) -> bool:
    """Whether ranks of a plan gather the parameters of a layer before they use them."""
    return STRATEGIES[plan.dp.strategy].shards_parameters


def check_kept(plan: Plan, keep: KeepGathered) -> None:
    """Raises `PlanError` for blocks to keep under a plan whose ranks gather none.

    One data rank gathers nothing under any strategy, and may run what many ranks keep.
    """
    if not keep or keep == "auto" or gathers_layers(plan) or plan.dp.size == 1:
        return
    raise PlanError(
        f"plan '{plan}': plan.keep_gathered {_shown(keep)} keeps what zero3 gathers, and under "
        f"{plan.dp} layers are whole; take dp{plan.dp.size}:zero3, or leave keep_gathered out"
    )


def kept_blocks(plan: Plan, keep: KeepGathered, num_blocks: int) -> tuple[int, ...]:
    """The numbers of the kept blocks of a model, from 0 on; none where a plan gathers none.

    Raises `PlanError` for more blocks than there are, and for a choice that was not made.
    """
    if not keep or not gathers_layers(plan):
        return ()
    if keep == "auto":
        raise PlanError(
            f"plan '{plan}': keep_gathered 'auto' is chosen by the planner for a model and a "
            "cluster; pass Options(keep_gathered=plait.estimate(config, plan, "
            "cluster).keep_gathered), or a number of blocks"
        )
    setting = f"plan '{plan}': plan.keep_gathered {_shown(keep)}"
    if isinstance(keep, int):
        if not 0 < keep <= num_blocks:
            raise PlanError(
                f"{setting} is the number of the last blocks that are kept, and the model has "
                f"{num_blocks} blocks; give 0 to {num_blocks}"
            )
        return tuple(range(num_blocks - keep, num_blocks))
    wrong = [number for number in keep if not 0 <= number < num_blocks]
    if wrong:
        raise PlanError(
            f"{setting} has block {wrong[0]}, and the model has {num_blocks} blocks; their numbers "
            f"are 0 to {num_blocks - 1}"
            if num_blocks
            else f"{setting} names blocks, and this model has none; leave it out"
        )
    return tuple(sorted(set(keep)))


def kept_key(blocks: Sequence[int] | int, num_blocks: int) -> str:
    """Blocks as the value of `keep_gathered` in a config: the number of the last ones, or a list.

    >>> kept_key([2, 3], 4)
    '2'
    >>> kept_key([1, 3], 4)
    '[1, 3]'
    """
    if isinstance(blocks, int):
        return str(blocks)
    count = len(blocks)
    return (
        str(count) if list(blocks) == [*range(num_blocks - count, num_blocks)] else str([*blocks])
    )


def kept_text(blocks: Sequence[int] | int) -> str:
    """Blocks by their numbers, as runs; or so many last ones.

    >>> kept_text([2, 3, 4, 7])
    'blocks 2 to 4, 7'
    >>> kept_text([])
    'no block'
    >>> kept_text(1)
    'the last 1 of its blocks'
    """
    if isinstance(blocks, int):
        return f"the last {blocks} of its blocks"
    if not blocks:
        return "no block"
    starts = [blocks[0], *(after for before, after in pairwise(blocks) if after != before + 1)]
    ends = [*(before for before, after in pairwise(blocks) if after != before + 1), blocks[-1]]
    runs = (f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))
    return f"blocks {', '.join(runs)}"


def _shown(keep: KeepGathered) -> str:
    return str(list(keep)) if isinstance(keep, tuple) else str(keep)
