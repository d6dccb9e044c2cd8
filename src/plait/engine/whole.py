"""Matrices that an optimizer needs whole, where each rank has a part of them.

Every rank keeps the state of its own parts. One owner computes the function of a whole matrix, and
sends each part of the result back. The owner holds a part itself. So a
matrix that lies on one rank does not travel. Owners are balanced by the cost of Newton-Schulz.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Axis, World
from plait.engine.axes import within_stage
from plait.mesh import Shard
from plait.mesh.boxes import Box
from plait.plan import Plan
from plait.plan.facts import STRATEGIES

WholeFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MatrixPart:
    """The elements of a matrix that one rank holds. `sends`: no rank before it holds the same."""

    rank: int
    numel: int
    index: slice | Tensor
    sends: bool


@dataclass(frozen=True)
class SplitMatrix:
    """A matrix in parts, and the rank that computes with the whole."""

    name: str
    shape: tuple[int, ...]
    owner: int
    parts: tuple[MatrixPart, ...]

    def of(self, rank: int) -> MatrixPart | None:
        """The part of a rank; None where it holds none."""
        return next((part for part in self.parts if part.rank == rank), None)


def whole_matrices(plan: Plan, world: World, shards: Sequence[Shard]) -> WholeMatrices | None:
    """The matrices of a stage of which its ranks hold parts; None where none can be cut.
    Collective.
    """
    facts = STRATEGIES[plan.dp.strategy]
    if not facts.synchronous or not (facts.shards_optimizer or plan.tp.size > 1):
        return None
    return WholeMatrices(within_stage(world), shards)


class WholeMatrices:
    """Applies functions of whole matrices to the parts of all ranks of an axis."""

    def __init__(self, axis: Axis, shards: Iterable[Shard]) -> None:
        """Agree on owners. Collective."""
        self._axis = axis
        own = [_place(shard) for shard in shards if len(shard.global_shape) == 2]
        self._matrices = _split_matrices(axis.gather_objects(own))

    def apply(self, parts: Mapping[str, Tensor], function: WholeFunction) -> dict[str, Tensor]:
        """The parts of `function(matrix)`, by name, from those of the matrices.

        All parts have one dtype, and so have the results. The ranks that hold a matrix give their
        parts, or none of them does. Collective.
        """
        results = {name: part for name, part in parts.items() if name not in self._matrices}
        results = {name: function(part) for name, part in results.items()}
        wholes = self._gathered(parts)
        made = {name: function(whole).reshape(-1) for name, whole in wholes.items()}
        return results | self._scattered(parts, made)

    def _gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole matrices that this rank owns and that have parts."""
        me = self._axis.rank
        used = [one for one in self._matrices.values() if one.name in parts]
        going = [
            (one.owner, parts[one.name].reshape(-1))
            for one in used
            if (mine := one.of(me)) is not None and mine.sends
        ]
        coming = [
            (part.rank, part.numel, (one, part))
            for one in used
            if one.owner == me
            for part in one.parts
            if part.sends
        ]
        wholes: dict[str, Tensor] = {}
        for (one, part), values in self._exchanged(going, coming, parts):
            if one.name not in wholes:
                wholes[one.name] = values.new_empty(math.prod(one.shape))
            wholes[one.name][part.index] = values
        return {name: whole.view(self._matrices[name].shape) for name, whole in wholes.items()}

    def _scattered(
        self, parts: Mapping[str, Tensor], made: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """This rank's parts of the results."""
        me = self._axis.rank
        going = [
            (part.rank, made[one.name][part.index])
            for one in self._matrices.values()
            if one.name in made
            for part in one.parts
        ]
        coming = [
            (one.owner, mine.numel, (one, mine))
            for one in self._matrices.values()
            if one.name in parts and (mine := one.of(me)) is not None
        ]
        found = self._exchanged(going, coming, parts)
        return {one.name: values.view(parts[one.name].shape) for (one, _), values in found}

    def _exchanged(
        self,
        going: Sequence[tuple[int, Tensor]],
        coming: Sequence[tuple[int, int, tuple[SplitMatrix, MatrixPart]]],
        parts: Mapping[str, Tensor],
    ) -> list[tuple[tuple[SplitMatrix, MatrixPart], Tensor]]:
        """One all-to-all of (rank, values); what comes is (rank, numel, label). Collective."""
        size = self._axis.size
        given = sorted(going, key=lambda item: item[0])
        taken = sorted(coming, key=lambda item: item[0])
        given_splits = [sum(one.numel() for to, one in given if to == rank) for rank in range(size)]
        taken_splits = [sum(n for source, n, _ in taken if source == rank) for rank in range(size)]
        empty = torch.empty(0, dtype=torch.bfloat16)
        source = torch.cat([one for _, one in given]) if given else empty
        out = source.new_empty(sum(taken_splits))
        self._axis.all_to_all(out, source, taken_splits, given_splits).wait()
        values = out.split([numel for _, numel, _ in taken]) if taken else ()
        return [(label, one) for (_, _, label), one in zip(taken, values, strict=True)]


Place = tuple[str, tuple[int, ...], Box, int, int, tuple[int, ...] | None]


def _place(shard: Shard) -> Place:
    return shard.name, shard.global_shape, shard.box, shard.start, shard.stop, shard.view


def _split_matrices(places: Sequence[Sequence[Place]]) -> dict[str, SplitMatrix]:
    """The matrices that no rank holds whole, by name, with balanced owners."""
    holders: dict[str, list[tuple[int, Place]]] = {}
    for rank, own in enumerate(places):
        for place in own:
            holders.setdefault(place[0], []).append((rank, place))
    load = [0] * len(places)
    found = {}
    for name, held in sorted(holders.items(), key=lambda item: (-_cost(item[1]), item[0])):
        shape = held[0][1][1]
        if all(place[4] - place[3] == math.prod(shape) for _, place in held):
            for rank, _ in held:
                load[rank] += _cost(held)
            continue
        owner = min((rank for rank, _ in held), key=lambda rank: (load[rank], rank))
        load[owner] += _cost(held)
        found[name] = SplitMatrix(name, shape, owner, _parts(held))
    return dict(sorted(found.items()))


def _cost(held: Sequence[tuple[int, Place]]) -> int:
    """The multiplications of Newton-Schulz, but for a factor."""
    rows, columns = held[0][1][1]
    return rows * columns * min(rows, columns)


def _parts(held: Sequence[tuple[int, Place]]) -> tuple[MatrixPart, ...]:
    seen = set()
    parts = []
    for rank, (name, shape, box, start, stop, view) in held:
        key = (box, start, stop)
        values = torch.empty(stop - start, device="meta")
        index = Shard(name, shape, box, start, stop, values, view).index()
        parts.append(MatrixPart(rank, stop - start, index, key not in seen))
        seen.add(key)
    return tuple(parts)
