"""Local sizes of each parameter under a tensor axis, in the model's order, and the gradients that
ranks share.

Copies of a parameter may see different tokens: norms, biases and positions where tokens are cut. So
may every weight of 2.5D over its depth. Its gradient is then summed over the tensor axis once a
step, on what ZeRO has left of it (`plait.parallel.tensor.split`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from plait.predict.cost.model.operations import Block, Elementwise, Lookup, Matmul
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.messages import Message


@dataclass(frozen=True)
class Held:
    """One parameter on one rank: its numbers, and whether an expert axis divides it. Its gradient
    is a partial sum over so many ranks of the tensor axis (`stride` apart); 1 for none.
    """

    numbers: float
    expert: bool = False
    partial: int = 1
    stride: int = 1


def ring_padding(runs: tuple[tuple[Block, int], ...], shard: Sharding, size: int) -> float:
    """Numbers that a ring of `size` ranks sends beyond 2(N-1)/N of the weights. Each block is cut
    into N chunks, the last one shorter. Of 2(N-1) steps the busiest rank meets the short chunk
    once.
    """
    numbers = [(sum(one.numbers for one in held(block, shard)), count) for block, count in runs]
    return (
        sum(count * (-round(number) % size) for number, count in numbers)
        * (size - 2)
        / (2 * (size - 1))
        if size > 1
        else 0.0
    )


@lru_cache(maxsize=65536)
def held(block: Block, shard: Sharding) -> tuple[Held, ...]:
    """The parameters of a block, in order."""
    return tuple(one for op in block.operations for one in _of(op, shard) if one.numbers)


def tied_split(blocks: Iterable[Block], shard: Sharding) -> int:
    """By how much a tensor axis divides a weight that is stored once: as much as a table."""
    tables = [op for block in blocks for op in block.operations if isinstance(op, Lookup)]
    is_whole = bool(tables) and all(table.split == "none" for table in tables)
    return 1 if is_whole else shard.weight_split


def _of(op: object, shard: Sharding) -> Iterator[Held]:
    layout = shard.layout
    # Gradients of vectors of the residual stream, of weights and of inner vectors are partial sums
    # over (ranks, stride).
    vector = layout.line(layout.residual.different)
    weight = layout.line(layout.linear["column"].partial)
    inner = layout.line(layout.inner.different)
    cut = layout.size(layout.residual.features)
    if isinstance(op, Matmul):
        if op.weightless:
            return
        experts = shard.ep if op.copies > 1 else 1
        column = op.split in {"column", "heads"}
        whole = op.split == "none" and op.copies == 1
        if op.copies > 1 and shard.folded:
            numbers = op.inputs * op.outputs + (op.outputs if op.bias else 0)
            yield Held(numbers * op.copies / experts, expert=True)
            return
        for outputs in op.parts or (op.outputs,):
            yield Held(
                op.inputs * outputs * op.copies / experts / (1 if whole else shard.weight_split),
                op.copies > 1,
                *(vector if whole else weight),
            )
            if op.bias:
                split = layout.size(layout.inner.features) if column else cut
                yield Held(
                    outputs * op.copies / experts / (1 if whole else split),
                    op.copies > 1,
                    *(inner if column else vector),
                )
    elif isinstance(op, Elementwise):
        tensors = max(1, op.statistics)  # weight, and bias of a layer norm
        for _ in range(tensors):
            yield Held(op.parameters / tensors / cut, False, *vector)
    elif isinstance(op, Lookup):
        whole = op.split == "none"
        rows = op.parameters / (1 if whole else shard.weight_split)
        yield Held(rows, False, *(vector if whole else weight))


def shared_sums(
    blocks: tuple[tuple[Block, int], ...], shard: Sharding, parts: int, width: float
) -> tuple[Message, ...]:
    """The all-reduces of partial gradients once a step, of the rank that has most of them. `parts`
    ranks divide each block's parameters end to end; `width` bytes a number.
    """
    if shard.tp == 1 or not any(
        one.partial > 1 for block, _ in blocks for one in held(block, shard)
    ):
        return ()
    by_rank: dict[int, dict[tuple[int, int], float]] = {}
    for block, count in blocks:
        for rank, group, numbers in _shared_by_rank(block, shard, parts):
            sums = by_rank.setdefault(rank, {})
            sums[group] = sums.get(group, 0.0) + count * numbers
    most = max(
        by_rank.values(),
        key=lambda sums: sum(2 * (size - 1) / size * n for (size, _), n in sums.items()),
    )
    return tuple(
        Message("tp", "all_reduce", numbers * width, "backward", size, stride)
        for (size, stride), numbers in most.items()
    )


@lru_cache(maxsize=4096)
def _shared_by_rank(
    block: Block, shard: Sharding, parts: int
) -> tuple[tuple[int, tuple[int, int], float], ...]:
    """(rank, group, numbers) of the shared gradients that each part of a block has. Experts are in
    buckets of their own.
    """
    own = [one for one in held(block, shard) if not one.expert]
    each = -(-int(sum(one.numbers for one in own)) // parts)
    shared = list[tuple[int, tuple[int, int], float]]()
    start = 0.0
    for one in own:
        stop = start + one.numbers
        if one.partial > 1:
            for rank in range(int(start // each), int(-(-stop // each))):
                shared.append(
                    (
                        rank,
                        (one.partial, one.stride),
                        min(stop, (rank + 1) * each) - max(start, rank * each),
                    )
                )
        start = stop
    return tuple(shared)


def least_keys(
    blocks: tuple[tuple[Block, int], ...],
    shard: Sharding,
    num_servers: int,
    *,
    experts: bool | None = None,
) -> float:
    """The numbers of the parameter server that owns fewest. Keys go, largest first, to the server
    with the least so far.

    `experts`: those of experts alone, or all but those; by default all.
    """
    keys = sorted(
        (
            one.numbers
            for block, count in blocks
            for one in held(block, shard)
            if experts is None or one.expert == experts
            for _ in range(count)
        ),
        reverse=True,
    )
    load = [0.0] * num_servers
    for key in keys:
        load[load.index(min(load))] += key
    return min(load)
