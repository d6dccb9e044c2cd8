"""Whole matrices of an optimizer such as Muon: bytes that their parts send, and products of owners.

Owners are shared out by the function that the engine calls (`plait.mesh.matrices`). Among very many
ranks they are taken as even.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from plait.mesh.boxes import Box
from plait.mesh.matrices import MatrixPlace, newton_schulz_multiplications, share_matrices
from plait.plan import Plan
from plait.plan.facts import STRATEGIES
from plait.predict.cost.memory.local_sizes import Held, held
from plait.predict.cost.model.operations import Block, Matmul, is_layer
from plait.predict.cost.sharding import Sharding

TRAVEL_BYTES = 2
"""Newton-Schulz computes in bf16, and so its matrices travel."""
MOST_PLACES = 20_000
"""Parts of matrices among which owners are shared out one by one."""

Runs = tuple[tuple[Block, int], ...]


@dataclass(frozen=True)
class MatrixUpdate:
    """The work of the busiest rank of a stage for whole matrices in a step.

    Attributes:
        sent_bytes: to owners and back, in two all-to-alls.
        flops: of Newton-Schulz.
        ranks: the ranks that exchange parts; 1 where no matrix is cut.
    """

    sent_bytes: float = 0.0
    flops: float = 0.0
    ranks: int = 1


NO_MATRIX_UPDATE = MatrixUpdate()
"""An optimizer that updates each element by itself."""


@dataclass(frozen=True)
class Matrix:
    """A matrix of a block: where it begins in its bucket on one rank, and the axes that cut it."""

    rows: int
    columns: int
    offset: int
    local: int
    axes: tuple[str, ...]


def matrix_update(runs: Runs, shard: Sharding, plan: Plan) -> MatrixUpdate:
    """The whole matrices of the blocks of a rank."""
    matrices = [(matrix, count) for block, count in runs for matrix in _matrices(block, shard)]
    every = sum(count * 2 * _multiplications(matrix) for matrix, count in matrices)
    facts = STRATEGIES[plan.dp.strategy]
    if not facts.synchronous or not (facts.shards_optimizer or plan.tp.size > 1):
        return MatrixUpdate(flops=float(every))
    data_ranks = plan.dp.size * plan.cp.size
    ranks = data_ranks * plan.tp.size
    number = sum(count for _, count in runs) * (ranks + len(matrices))
    if number > MOST_PLACES:
        return _even(runs, shard, plan, ranks)
    places = [_places(runs, shard, plan, rank) for rank in range(ranks)]
    work = share_matrices(places)
    sent = max(work.sent_numbers(rank) for rank in range(ranks))
    return MatrixUpdate(
        TRAVEL_BYTES * float(sent), 2.0 * max(work.multiplications), ranks if work.split else 1
    )


def _even(runs: Runs, shard: Sharding, plan: Plan, ranks: int) -> MatrixUpdate:
    """Owners that have equally much, one matrix at least, of matrices that all travel."""
    sent = flops = most_sent = most_flops = 0.0
    copies = plan.dp.size * plan.cp.size // plan.optimizer_shards
    for block, count in runs:
        each = _bucket_part(block, shard, plan)
        for matrix in _matrices(block, shard):
            cuts = shard.layout.size(matrix.axes)
            holders = cuts * max(1.0, matrix.local / each)
            numbers = matrix.local * cuts * (1 - 1 / holders)
            returned = numbers * copies * shard.tp / cuts
            sent += count * (numbers + returned)
            most_sent = max(most_sent, returned)
            flops += count * 2.0 * _multiplications(matrix)
            most_flops = max(most_flops, 2.0 * _multiplications(matrix))
    sent_bytes = TRAVEL_BYTES * max(sent / ranks, most_sent)
    return MatrixUpdate(sent_bytes, max(flops / ranks, most_flops), ranks)


def _multiplications(matrix: Matrix) -> int:
    return newton_schulz_multiplications(matrix.rows, matrix.columns)


@lru_cache(maxsize=4096)
def _matrices(block: Block, shard: Sharding) -> tuple[Matrix, ...]:
    """The matrices of a layer, in the order of its parameters; none of embedding and head."""
    if not is_layer(block):
        return ()
    shapes = list(_shapes(block, shard))
    matrices = []
    offset = 0
    for one, shape in zip(held(block, shard), shapes, strict=True):
        if shape is not None:
            rows, columns, axes = shape
            matrices.append(Matrix(rows, columns, offset, int(one.numbers), axes))
        if _is_beside(one, shard):
            offset += int(one.numbers)
    return tuple(matrices)


def _is_beside(one: Held, shard: Sharding) -> bool:
    """Whether a parameter lies in the bucket of matrices; split experts have their own."""
    return not one.expert or shard.ep == 1


def _bucket_part(block: Block, shard: Sharding, plan: Plan) -> int:
    """Numbers of a block's bucket that a rank of the data axis updates."""
    numbers = sum(int(one.numbers) for one in held(block, shard) if _is_beside(one, shard))
    return -(-numbers // plan.optimizer_shards)


def _shapes(block: Block, shard: Sharding) -> Iterator[tuple[int, int, tuple[str, ...]] | None]:
    """Rows, columns and cuts of each matrix of `held`; None for its other parameters."""
    for op in block.operations:
        number = len(held(Block("", (op,), block.saved, 0), shard))
        if not isinstance(op, Matmul) or op.convolution or op.copies > 1:
            yield from (None for _ in range(number))
            continue
        parts = op.parts or (op.outputs,)
        axes = _axes(op, shard)
        for outputs in parts if number else ():
            yield outputs, op.inputs, axes
            if number > len(parts):  # a bias each
                yield None


def _axes(op: Matmul, shard: Sharding) -> tuple[str, ...]:
    """The axes that cut the weight."""
    if op.split == "none":
        return ()
    role = "row" if op.split == "row" else "column"
    linear = shard.layout.linear[role]
    return tuple(sorted(linear.out + linear.into))


def _places(runs: Runs, shard: Sharding, plan: Plan, rank: int) -> list[MatrixPlace]:
    """The parts of matrices that a rank of the stage updates, in the order of its buckets."""
    data_rank, tensor_rank = divmod(rank, plan.tp.size)
    parts = plan.optimizer_shards
    places = []
    number = 0
    for block, count in runs:
        matrices = _matrices(block, shard)
        each = _bucket_part(block, shard, plan)
        low = data_rank % parts * each
        for _ in range(count):
            for index, matrix in enumerate(matrices):
                start = max(0, low - matrix.offset)
                stop = min(matrix.local, low + each - matrix.offset)
                if start < stop:
                    name = f"{number}.{index}"
                    places.append(_place(name, matrix, shard, tensor_rank, (start, stop)))
            number += 1
    return places


def _place(
    name: str, matrix: Matrix, shard: Sharding, tensor_rank: int, reach: tuple[int, int]
) -> MatrixPlace:
    """A range of a tensor rank's part, which has a number in the place of its true box."""
    at = _part(matrix.axes, shard, tensor_rank)
    box = Box((at * matrix.local,), (matrix.local,))
    return MatrixPlace(name, (matrix.rows, matrix.columns), box, *reach)


def _part(axes: tuple[str, ...], shard: Sharding, tensor_rank: int) -> int:
    """Which of the parts that the axes make is a tensor rank's."""
    part = 0
    stride = shard.tp
    for name, size in shard.layout.parts:
        stride //= size
        if name in axes:
            part = part * size + tensor_rank // stride % size
    return part
