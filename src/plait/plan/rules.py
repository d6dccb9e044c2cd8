"""The rules that a plan must keep by itself, before any model, batch or machine is known.

Each rule is one small function. It returns None or one message naming the thing, the numbers and
the cure. So `broken_rules` can report every failure at once. A rule about one axis takes the
axis: the parser asks those too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd, isqrt
from typing import Any, Final

from plait.errors import nearest
from plait.plan import axes
from plait.plan.axes import ContextAxis, DataAxis, PipelineAxis, TensorAxis, cube_root
from plait.plan.facts import SCHEDULES, STRATEGIES, broken_shape
from plait.plan.terms import Terms

MOST_DEPTHS: Final = 1000
"""Depths of a 2.5d grid that are tried for a proposal."""

# --- numbers and words: what a record built by hand can get wrong and a text cannot
# -------------------------------


def _not_counts(thing: object, **numbers: object) -> list[str]:
    return [
        f"{thing}: {name} must be a whole number from 1, not {value!r}"
        for name, value in numbers.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]


def _unknown_word(thing: object, kind: str, word: str, known: tuple[str, ...]) -> list[str]:
    return (
        [] if word in known else [f"{thing}: unknown {kind} {word!r}; {nearest(str(word), known)}"]
    )


def malformed(plan: Terms) -> list[str]:
    """Sizes that are no counts and words that the grammar does not have; other rules only make
    sense without these.
    """
    dp = plan.dp
    tp = plan.tp
    pp = plan.pp
    cp = plan.cp
    return [
        *_not_counts("dp", size=dp.size, replicate=dp.replicate),
        *_not_counts("tp", size=tp.size, depth=tp.depth),
        *_not_counts("pp", size=pp.size, virtual=pp.virtual),
        *_not_counts("cp", size=cp.size),
        *_not_counts("plan", ep=plan.ep, micro_batches=plan.micro_batches),
        *_unknown_word("dp", "strategy", dp.strategy, axes.DATA_STRATEGIES),
        *_unknown_word("tp", "mode", tp.mode, axes.TENSOR_MODES),
        *_unknown_word("pp", "schedule", pp.schedule, axes.PIPELINE_SCHEDULES),
        *_unknown_word("cp", "strategy", cp.strategy, axes.CONTEXT_STRATEGIES),
        *_unknown_word("remat", "word", plan.remat, axes.REMAT_WORDS),
        *_unknown_word("precision", "word", plan.precision, axes.PRECISIONS),
    ]


# --- options: which belong to which word, and which are needed
# -----------------------------------------------------


def _takes(dp: DataAxis, option: str) -> bool:
    return option in STRATEGIES[dp.strategy].options


def stale_only_with_async_server(dp: DataAxis) -> str | None:
    """`staleK` bounds the asynchronous server alone."""
    if dp.stale is None or _takes(dp, "stale"):
        return None
    return (
        f"{dp}: stale{dp.stale} belongs to async-server; write "
        f"dp{dp.size}:async-server,stale{dp.stale} or leave it out"
    )


def async_server_needs_stale(dp: DataAxis) -> str | None:
    """The asynchronous server has no bound that would be right for everyone."""
    if not _takes(dp, "stale") or (dp.stale is not None and dp.stale >= 0):
        return None
    return (
        f"{dp}: async-server needs staleK, the most updates that a worker may lag behind (0 or "
        "more); "
        f"write for example dp{dp.size}:async-server,stale2"
    )


def every_only_with_local(dp: DataAxis) -> str | None:
    """`everyH` is the period of local SGD alone."""
    if dp.every is None or _takes(dp, "every"):
        return None
    return (
        f"{dp}: every{dp.every} belongs to local; write dp{dp.size}:local,every{dp.every} or leave "
        "it out"
    )


def local_needs_every(dp: DataAxis) -> str | None:
    """Local SGD without a period would never average."""
    if not _takes(dp, "every") or (dp.every is not None and dp.every >= 1):
        return None
    return (
        f"{dp}: local needs everyH, the steps between two averagings (1 or more); write for "
        f"example dp{dp.size}:local,every8"
    )


def replicate_only_with_zero(dp: DataAxis) -> str | None:
    """Only sharded state can be replicated."""
    if dp.replicate == 1 or _takes(dp, "replicate"):
        return None
    return (
        f"{dp}: replicate{dp.replicate} belongs to zero1, zero2 and zero3, because {dp.strategy} "
        "replicates everything; "
        f"write dp{dp.size}:zero3,replicate{dp.replicate} or leave it out"
    )


def offload_only_with_zero(dp: DataAxis) -> str | None:
    """Offloading moves the sharded optimizer state to the host."""
    if not dp.offload or _takes(dp, "offload"):
        return None
    return (
        f"{dp}: offload belongs to zero1, zero2 and zero3; write dp{dp.size}:zero1,offload or "
        "leave it out"
    )


def sequence_parallel_only_with_1d(tp: TensorAxis) -> str | None:
    """The other modes shard the activations between layers already."""
    if not tp.sequence_parallel or tp.mode == "1d":
        return None
    return (
        f"{tp}: sp belongs to 1d, because {tp.mode} shards these activations already; write "
        f"tp{tp.size}:{tp.mode}"
    )


def depth_only_with_2_5d(tp: TensorAxis) -> str | None:
    """`depthD` is the third side of the 2.5d grid."""
    if tp.depth == 1 or tp.mode == "2.5d":
        return None
    return (
        f"{tp}: depth{tp.depth} belongs to 2.5d; write tp{tp.size}:2.5d,depth{tp.depth} or leave "
        "it out"
    )


def virtual_only_with_interleaved(pp: PipelineAxis) -> str | None:
    """Every other schedule fixes the stages of a rank by itself."""
    fixed = SCHEDULES[pp.schedule].stages_per_rank
    if fixed in (None, pp.virtual):
        return None
    return (
        f"{pp}: v{pp.virtual} belongs to interleaved, because {pp.schedule} always has {fixed} to "
        "a rank; "
        f"write pp{pp.size}:interleaved,v{max(2, pp.virtual)} or pp{pp.size}:{pp.schedule}"
    )


# --- numbers that must fit together
# -------------------------------------------------------------------------------


def _divisor(name: str, number: int, whole: int) -> str:
    common = gcd(number, whole)
    return (
        f"choose a divisor of {whole}, as {name}{common}"
        if common > 1
        else f"choose a divisor of {whole}"
    )


def replicate_divides_dp(dp: DataAxis) -> str | None:
    """The replicas share the ranks of dp evenly."""
    if dp.size % dp.replicate == 0:
        return None
    return (
        f"{dp}: replicate{dp.replicate} does not divide dp{dp.size}; "
        f"{_divisor('replicate', dp.replicate, dp.size)}"
    )


def tensor_2d_is_square(tp: TensorAxis) -> str | None:
    """2d: q x q ranks."""
    q = isqrt(tp.size)
    if tp.mode != "2d" or q * q == tp.size:
        return None
    return (
        f"tp{tp.size}:2d needs a square number of ranks; the nearest are tp{q * q}:2d and "
        f"tp{(q + 1) ** 2}:2d"
    )


def tensor_2_5d_is_square_times_depth(tp: TensorAxis) -> str | None:
    """2.5d: q x q x depth ranks."""
    if tp.mode != "2.5d":
        return None
    depth = tp.depth
    q = isqrt(tp.size // depth)
    if q * q * depth == tp.size:
        return None
    near = [f"tp{n * n * depth}:2.5d,depth{depth}" for n in (q, q + 1) if n]
    these = (
        f"the nearest are {near[0]} and {near[1]}"
        if len(near) == 2
        else f"the nearest is {near[0]}"
    )
    other = _grid_depth(tp.size)
    also = f"; with another depth: tp{tp.size}:2.5d,depth{other}" if other > 1 else ""
    return f"tp{tp.size}:2.5d,depth{depth} needs q x q x {depth} ranks; {these}{also}"


def _grid_depth(size: int) -> int:
    """The greatest depth of a 2.5d grid of so many ranks, which is q at most; 0 without one."""
    for depth in range(min(cube_root(size), MOST_DEPTHS), 0, -1):
        if size % depth == 0 and isqrt(size // depth) ** 2 * depth == size:
            return depth
    return 0


def tensor_3d_is_cube(tp: TensorAxis) -> str | None:
    """3d: q x q x q ranks."""
    q = cube_root(tp.size)
    if tp.mode != "3d" or q**3 == tp.size:
        return None
    return (
        f"tp{tp.size}:3d needs a cubic number of ranks; the nearest are tp{q**3}:3d and "
        f"tp{(q + 1) ** 3}:3d"
    )


def schedule_has_the_shape(plan: Terms) -> str | None:
    """The stages of a rank and the micro-batches are some that the generator makes."""
    pp = plan.pp
    facts = SCHEDULES[pp.schedule]
    if facts.stages_per_rank not in (None, pp.virtual):
        return None  # said by the rule of the option
    broken = broken_shape(pp.schedule, facts, (pp.size, pp.virtual, plan.micro_batches))
    return None if broken is None else f"{pp} mb{plan.micro_batches}: {broken}"


def experts_borrow_existing_ranks(plan: Terms) -> str | None:
    """`ep` takes its ranks from dp x cp, or from those and all of tp."""
    lenders = plan.dp.size * plan.cp.size
    if lenders % plan.ep == 0 or plan.folds_experts:
        return None
    return (
        f"ep{plan.ep} borrows its ranks from dp{plan.dp.size} x cp{plan.cp.size} = {lenders}, "
        "which it does not divide; "
        f"{_divisor('ep', plan.ep, lenders)}, or dp{plan.ep}"
    )


AXIS_RULES: Final[dict[type, tuple[Callable[[Any], str | None], ...]]] = {
    DataAxis: (
        stale_only_with_async_server,
        async_server_needs_stale,
        every_only_with_local,
        local_needs_every,
        replicate_only_with_zero,
        offload_only_with_zero,
    ),
    TensorAxis: (sequence_parallel_only_with_1d, depth_only_with_2_5d),
    PipelineAxis: (virtual_only_with_interleaved,),
    ContextAxis: (),
}
"""Which option belongs to which word: the grammar's own rules, asked by the parser and by
`check`.
"""

NUMBER_RULES: Final[tuple[Callable[[Terms], str | None], ...]] = (
    lambda plan: replicate_divides_dp(plan.dp),
    lambda plan: tensor_2d_is_square(plan.tp),
    lambda plan: tensor_2_5d_is_square_times_depth(plan.tp),
    lambda plan: tensor_3d_is_cube(plan.tp),
    schedule_has_the_shape,
    experts_borrow_existing_ranks,
)
"""Whether the numbers fit together: asked by `check` alone."""


def broken_axis_rules(axis: DataAxis | TensorAxis | PipelineAxis | ContextAxis) -> Iterator[str]:
    """The messages of the rules that one axis breaks by itself."""
    for rule in AXIS_RULES[type(axis)]:
        message = rule(axis)
        if message is not None:
            yield message


def broken_rules(plan: Terms) -> list[str]:
    """Every message of every rule that the plan breaks; empty for a good plan."""
    broken = malformed(plan)
    if broken:
        return broken
    for axis in (plan.pp, plan.tp, plan.dp, plan.cp):
        broken += broken_axis_rules(axis)
    messages = [rule(plan) for rule in NUMBER_RULES]
    return broken + [message for message in messages if message is not None]
