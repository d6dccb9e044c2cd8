"""The transition table and the bytes of every operation. Pure: the cost model and the ledger share
these formulae.

One law gives every backward: that of `a -> b` is `b* -> a*`. So the table needs only the forward
operation of each pair of letters. The first group of rows communicates, the second is local.

    P -> I, P -> R   all_reduce        I -> R, a -> a   none
    S -> R, S -> I   all_gather        I -> S, R -> S   slice  (its own part)
    P -> S           reduce_scatter    S -> P           pad    (its own part among zeros)
    S(i) -> S(j)     all_to_all        R -> P, I -> P   keep   (rank 0 the value, others zeros)

`R -> I` moves nothing: the value is the same. Its gradient then is `I -> P`, which `keep` makes a
partial sum.
"""

from __future__ import annotations

from functools import cache

from plait.errors import PlanError
from plait.mesh.layouts import Layout, Sharded

_OPS = {
    ("P", "I"): "all_reduce",
    ("P", "R"): "all_reduce",
    ("S", "R"): "all_gather",
    ("S", "I"): "all_gather",
    ("P", "S"): "reduce_scatter",
    ("I", "R"): "none",
    ("R", "I"): "none",
    ("R", "R"): "none",
    ("I", "I"): "none",
    ("P", "P"): "none",
    ("I", "S"): "slice",
    ("R", "S"): "slice",
    ("S", "P"): "pad",
    ("R", "P"): "keep",
    ("I", "P"): "keep",
}

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "send",
    "shift",
)
LOCAL = ("none", "slice", "pad", "keep")


@cache
def operation(source: Layout, target: Layout) -> str:
    """The operation that turns `source` into `target`: one of the collectives, or a local one.

    Raises:
        PlanError: no operation leads from one to the other.
    """
    if isinstance(source, Sharded) and isinstance(target, Sharded):
        return "none" if source.dim == target.dim else "all_to_all"
    try:
        return _OPS[source.letter, target.letter]
    except KeyError:
        raise PlanError(
            f"no transition {source} -> {target}; layouts are R, I, P and S(dim)"
        ) from None


@cache
def backward(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """The pair that the gradient takes when the value takes `source -> target`: (target*,
    source*).
    """
    return target.dual(), source.dual()


def bytes_sent(op: str, payload_bytes: int, size: int) -> int:
    """Bytes that one rank sends in one operation over `size` ranks.

    `payload_bytes` is the full tensor (all_reduce, broadcast, reduce, the unsharded side of
    reduce_scatter and all_gather), or what this rank holds (all_to_all, send, shift).

        all_reduce                   2 (N-1)/N B   reduce-scatter, then all-gather; optimal
        reduce_scatter, all_gather     (N-1)/N B
        all_to_all                     (N-1)/N B   even splits; uneven ones are counted as they are
        broadcast, reduce              (N-1)/N B   a rank's share of N-1 copies, whatever the tree
        send, shift                            B
        local operations                       0

    Raises:
        PlanError: an unknown operation.
    """
    if size == 1 or op in LOCAL:
        return 0
    if op == "all_reduce":
        return 2 * (size - 1) * payload_bytes // size
    if op in {"reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"}:
        return (size - 1) * payload_bytes // size
    if op in {"send", "shift"}:
        return payload_bytes
    raise PlanError(f"no operation {op!r}; known: {', '.join((*COLLECTIVES, *LOCAL))}")


def transition_bytes(source: Layout, target: Layout, global_bytes: int, size: int) -> int:
    """Bytes that one rank sends in the forward of `source -> target` of a tensor of `global_bytes`
    (unsharded).
    """
    op = operation(source, target)
    return bytes_sent(op, global_bytes // size if op == "all_to_all" else global_bytes, size)


def transition_bytes_backward(source: Layout, target: Layout, global_bytes: int, size: int) -> int:
    """Bytes that one rank sends in the backward of `source -> target`."""
    return transition_bytes(*backward(source, target), global_bytes, size)
