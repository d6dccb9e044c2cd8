"""Random sequences of collectives: what each rank does, and what must come out, computed in one
process.

The values are small integers, so that sums are exact in every dtype and equality can be bitwise.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import torch

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "shift")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


@dataclass
class Case:
    """One operation of all ranks: inputs by rank, and the expected result by rank (None:
    undefined).
    """

    op: str
    inputs: list[torch.Tensor]
    expected: list[torch.Tensor | None]
    root: int = 0
    splits: list[list[int]] = field(default_factory=list)


def make(op: str, size: int, numel: int, dtype: torch.dtype, chance: random.Random) -> Case:
    """`numel` per rank and part."""
    root = chance.randrange(size)
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))

    def draw(n: int) -> torch.Tensor:
        return torch.randint(-8, 9, (n,), generator=generator).to(dtype)

    if op == "all_to_all":
        splits = [[chance.randrange(numel + 1) for _ in range(size)] for _ in range(size)]
        parts = [[draw(n) for n in row] for row in splits]
        inputs = [torch.cat(row) for row in parts]
        return Case(
            op,
            inputs,
            [torch.cat([parts[s][r] for s in range(size)]) for r in range(size)],
            root,
            splits,
        )
    inputs = [draw(numel * size if op == "reduce_scatter" else numel) for _ in range(size)]
    total = torch.stack(inputs).sum(0, dtype=dtype)
    if op == "all_reduce":
        expected = [total] * size
    elif op == "reduce_scatter":
        expected = list(total.chunk(size)) if numel else [total] * size
    elif op == "all_gather":
        expected = [torch.cat(inputs)] * size
    elif op == "broadcast":
        expected = [inputs[root]] * size
    elif op == "reduce":
        expected = [total if rank == root else None for rank in range(size)]
    else:
        expected = [inputs[(rank - 1) % size] for rank in range(size)]
    return Case(op, inputs, expected, root)


def start(case: Case, axis, memory: str):
    """Issue the own side; memory: `plain`, `empty` (the axis's own) or `alias` (in place). Gives
    (work, result).
    """
    rank = axis.rank
    size = axis.size
    source = case.inputs[axis.rank]

    def room(numel: int) -> torch.Tensor:
        return (
            torch.empty(numel, dtype=source.dtype)
            if memory == "plain"
            else axis.empty(numel, source.dtype, source.device)
        )

    mine = room(source.numel()).copy_(source)
    if case.op in {"all_reduce", "broadcast", "reduce"}:
        operation = getattr(axis, case.op)
        return (operation(mine) if case.op == "all_reduce" else operation(mine, case.root)), mine
    if case.op == "reduce_scatter":
        numel = source.numel() // size
        out = mine[rank * numel : (rank + 1) * numel] if memory == "alias" else room(numel)
        return axis.reduce_scatter(out, mine), out
    if case.op == "all_gather":
        numel = source.numel()
        full = room(numel * size)
        shard = full[rank * numel : (rank + 1) * numel].copy_(source) if memory == "alias" else mine
        return axis.all_gather(full, shard), full
    out = room(case.expected[rank].numel())
    if case.op == "shift":
        return axis.shift(out, mine), out
    return axis.all_to_all(out, mine, [row[rank] for row in case.splits], case.splits[rank]), out


def check(case: Case, rank: int, result: torch.Tensor) -> None:
    expected = case.expected[rank]
    if expected is not None:
        torch.testing.assert_close(
            result, expected, rtol=0, atol=0, msg=lambda m: f"{case.op} on rank {rank}: {m}"
        )


def run_random(world, seed: int, num_ops: int, largest: int, nap_seconds: float = 0.002) -> None:
    """A random sequence on the world axis: random memory, several under way, waited in random
    order, with naps.
    """
    from plait.comm import wait_all

    axis = world.axis("world")
    shared = random.Random(seed)
    own = random.Random(seed * 1000 + world.rank)  # the same on all ranks; each its own
    under_way = []
    for _ in range(num_ops):
        numel = shared.choice((0, 1, 7, 1000, largest))
        case = make(shared.choice(OPS), world.size, numel, shared.choice(DTYPES), shared)
        under_way.append((case, *start(case, axis, own.choice(("plain", "empty", "alias")))))
        if own.random() < 0.3:
            time.sleep(own.random() * nap_seconds)
        if own.random() < 0.4:
            own.shuffle(under_way)
            if own.random() < 0.5:
                wait_all(work for _, work, _ in under_way)
            for _ in range(own.randrange(len(under_way) + 1)):
                case, work, result = under_way.pop()
                work.wait()
                check(case, axis.rank, result)
    wait_all(work for _, work, _ in under_way)
    for case, _, result in under_way:
        check(case, axis.rank, result)
