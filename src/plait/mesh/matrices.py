"""Matrices of which ranks hold parts, and the rank that computes with each as a whole.

An optimizer of whole matrices sends parts to one owner, and the owner sends parts of the result
back. Owners hold a part themselves, and are balanced by cost: that of Newton-Schulz for Muon. The
engine moves by this table, and the cost model counts by it. Pure: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from plait.mesh.boxes import Box

NEWTON_SCHULZ_STEPS = 5
"""Steps of Newton-Schulz in Muon's update of a matrix."""


@dataclass(frozen=True)
class MatrixPlace:
    """The elements [start, stop) of a box of a matrix, as in `plait.mesh.shard`, without values.

    An optimizer may want other tensors whole, too, so the shape is any.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int
    view: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether these are all elements of the matrix."""
        return self.numel == math.prod(self.shape)


@dataclass(frozen=True)
class MatrixPart:
    """The elements of a matrix that one rank holds. `sends`: no rank before it holds the same."""

    rank: int
    place: MatrixPlace
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


@dataclass(frozen=True)
class MatrixWork:
    """The whole matrices of the ranks of a stage.

    Attributes:
        split: matrices in parts, by name.
        multiplications: of the function of whole matrices, on each rank.
        first: the first of the ranks that hold a matrix whole, by name.
    """

    split: Mapping[str, SplitMatrix]
    multiplications: tuple[int, ...]
    first: Mapping[str, int] = field(default_factory=dict)

    def sent_numbers(self, rank: int) -> int:
        """Numbers that a rank sends in a step: its parts to owners, and results to other ranks."""
        sent = 0
        for matrix in self.split.values():
            for part in matrix.parts:
                if part.rank == matrix.owner:
                    continue
                if rank == part.rank and part.sends:
                    sent += part.place.numel
                if rank == matrix.owner:
                    sent += part.place.numel
        return sent


Cost = Callable[[tuple[int, ...]], int]
"""Multiplications of the function of a whole matrix, by its shape."""


def newton_schulz(shape: tuple[int, ...]) -> int:
    """The cost of Muon's update of a matrix."""
    rows, columns = shape
    return newton_schulz_multiplications(rows, columns)


def factor_cost(shape: tuple[int, ...]) -> int:
    """The cost of statistics and roots of one factor for each dimension, as in Shampoo and SOAP."""
    return sum(math.prod(shape) * size + size**3 for size in shape)


def share_matrices(
    places: Sequence[Sequence[MatrixPlace]],
    wanted: Callable[[str], bool] = lambda name: True,
    cost_of: Cost = newton_schulz,
) -> MatrixWork:
    """Owners of the wanted matrices, from the places that each rank holds.

    Dear matrices are given away first. Among equals the order is that of the ranks' places.
    """
    holders: dict[str, list[tuple[int, MatrixPlace]]] = {}
    for rank, own in enumerate(places):
        for place in own:
            if wanted(place.name):
                holders.setdefault(place.name, []).append((rank, place))
    costs = {name: cost_of(held[0][1].shape) for name, held in holders.items()}
    load = [0] * len(places)
    split = {}
    first = {}
    for name, holder_places in sorted(holders.items(), key=lambda item: -costs[item[0]]):
        cost = costs[name]
        if all(place.is_whole for _, place in holder_places):
            for rank, _ in holder_places:
                load[rank] += cost
            first[name] = holder_places[0][0]
            continue
        owner = min((rank for rank, _ in holder_places), key=lambda rank: (load[rank], rank))
        load[owner] += cost
        split[name] = SplitMatrix(name, holder_places[0][1].shape, owner, _parts(holder_places))
    return MatrixWork(dict(sorted(split.items())), tuple(load), first)


def newton_schulz_multiplications(rows: int, columns: int) -> int:
    """Multiplications of Newton-Schulz: two products with the matrix a step, and one square."""
    short = min(rows, columns)
    return NEWTON_SCHULZ_STEPS * (2 * short * short * max(rows, columns) + short**3)


def _parts(held: Sequence[tuple[int, MatrixPlace]]) -> tuple[MatrixPart, ...]:
    seen = set()
    parts = []
    for rank, place in held:
        key = (place.box, place.start, place.stop)
        parts.append(MatrixPart(rank, place, key not in seen))
        seen.add(key)
    return tuple(parts)
