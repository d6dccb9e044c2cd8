"""Matrices that an optimizer needs whole, where each rank has a part of them.

Every rank keeps the state of its own parts. One owner computes the function of a whole matrix, and
sends each part of the result back (`plait.mesh.matrices`). A matrix that lies on one rank does not
travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from plait.comm import Axis, World
from plait.engine.axes import within_stage
from plait.mesh import Shard
from plait.mesh.boxes import Box, FlatRange
from plait.mesh.matrices import (
    MatrixPart,
    MatrixPlace,
    SplitMatrix,
    factor_cost,
    share_matrices,
)
from plait.mesh.units import UnitPart, units_of
from plait.plan import Plan
from plait.plan.facts import STRATEGIES

MATRIX = 2
WholeFunction = Callable[[Tensor], Tensor]
CountOf = Callable[[str, tuple[int, ...]], int]
"""The equal blocks of rows that a tensor is taken in, by its name and shape."""


def whole_matrices(plan: Plan, world: World, shards: Sequence[Shard]) -> WholeMatrices | None:
    """The matrices of a stage of which its ranks hold parts; None where none can be cut.
    Collective.
    """
    facts = STRATEGIES[plan.dp.strategy]
    cuts = facts.shards_optimizer or plan.tp.size > 1 or plan.ep > 1
    if not facts.synchronous or not cuts:
        return None
    return WholeMatrices(within_stage(world), shards)


class WholeMatrices:
    """Applies functions of whole matrices to the parts of all ranks of an axis."""

    def __init__(self, axis: Axis, shards: Iterable[Shard]) -> None:
        """Agree on owners. Collective."""
        self._axis = axis
        own = [place_of(shard) for shard in shards]
        self._places: list[list[MatrixPlace]] = axis.gather_objects(own)
        self.restrict(lambda name: True)

    def restrict(self, wanted: Callable[[str], bool]) -> None:
        """Share only the matrices of these names among owners, as the others never travel.

        Every rank gives the same function of a name.
        """
        matrices = [[one for one in own if len(one.shape) == MATRIX] for own in self._places]
        self._travel = Travel(self._axis, share_matrices(matrices, wanted).split)

    def apply(self, parts: Mapping[str, Tensor], function: WholeFunction) -> dict[str, Tensor]:
        """The parts of `function(matrix)`, by name, from those of the matrices.

        `function` takes and gives [rows, columns]. A part [...] keeps its shape. All parts have one
        dtype, and so have the results. The ranks that hold a matrix give their parts, or none of
        them does. Collective.
        """
        split = self._travel.split
        results = {name: function(one) for name, one in parts.items() if name not in split}
        going = {name: one.reshape(1, -1) for name, one in parts.items() if name in split}
        wholes = self._travel.gathered(going)
        made = {
            name: function(whole[0].view(split[name].shape)).reshape(-1)
            for name, whole in wholes.items()
        }
        found = self._travel.scattered(going, made)
        return results | {name: one.view(parts[name].shape) for name, one in found.items()}

    def units(self, count_of: CountOf) -> SharedUnits:
        """All tensors, or equal blocks of their rows, shared among owners.

        `count_of` gives the blocks of a tensor by name and shape, alike on every rank.
        """
        return SharedUnits(self._axis, self._places, count_of)


class SharedUnits:
    """Whole tensors or blocks of their rows, with their owners.

    Attributes:
        parts: what this rank holds, by the name of the unit.
        shares: whether ranks agreed on owners; else each has all tensors whole.
        travel: moves parts to owners, and results back; None on a rank alone.
    """

    def __init__(
        self, axis: Axis | None, places: Sequence[Sequence[MatrixPlace]], count_of: CountOf
    ) -> None:
        """Take the places of all ranks of an axis, or of this rank alone without one."""
        self._rank = 0 if axis is None else axis.rank
        self.shares = axis is not None
        cut = [_cut(own, count_of) for own in places]
        self.parts: dict[str, UnitPart] = {part.place.name: part for part in cut[self._rank]}
        own_places = [[part.place for part in own] for own in cut]
        self._work = share_matrices(own_places, lambda name: True, factor_cost)
        self.travel = None if axis is None else Travel(axis, self._work.split)

    def is_split(self, unit: str) -> bool:
        """Whether ranks hold parts of a unit."""
        return unit in self._work.split

    def is_computed(self, unit: str) -> bool:
        """Whether this rank computes with a unit: its owner, or one that holds it whole."""
        matrix = self._work.split.get(unit)
        return unit in self.parts if matrix is None else matrix.owner == self._rank

    def is_saved(self, unit: str) -> bool:
        """Whether this rank is the one of those that compute with a unit that saves its state."""
        matrix = self._work.split.get(unit)
        owner = self._work.first.get(unit) if matrix is None else matrix.owner
        return owner == self._rank


class Travel:
    """Moves the parts of matrices to owners and results back: an all-to-all each.

    Attributes:
        split: the matrices in parts, by name.
    """

    def __init__(self, axis: Axis, split: Mapping[str, SplitMatrix]) -> None:
        self._axis = axis
        self.split = split

    def gathered(self, parts: Mapping[str, Tensor], rows: int = 1) -> dict[str, Tensor]:
        """The whole matrices that this rank owns, of shape [rows, numel].

        `parts` have shape [rows, elements of the part], and one dtype. Collective.
        """
        me = self._axis.rank
        used = [one for one in self.split.values() if one.name in parts]
        going = [
            (one.owner, parts[one.name].reshape(-1))
            for one in used
            if (mine := one.of(me)) is not None and mine.sends
        ]
        coming = [
            (part.rank, rows * part.place.numel, (one, part))
            for one in used
            if one.owner == me
            for part in one.parts
            if part.sends
        ]
        wholes: dict[str, Tensor] = {}
        for (one, part), values in self._exchanged(going, coming, parts):
            if one.name not in wholes:
                wholes[one.name] = values.new_empty(rows, math.prod(one.shape))
            for whole, row in zip(wholes[one.name], values.view(rows, -1), strict=True):
                _write(whole, part.place, row)
        return wholes

    def scattered(
        self, parts: Mapping[str, Tensor], made: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """This rank's parts [elements of the part] of the results `made` [numel], which are flat
        whole matrices at owners. Collective.
        """
        me = self._axis.rank
        going = [
            (part.rank, _read(made[one.name], part.place))
            for one in self.split.values()
            if one.name in made
            for part in one.parts
        ]
        coming = [
            (one.owner, mine.place.numel, (one, mine))
            for one in self.split.values()
            if one.name in parts and (mine := one.of(me)) is not None
        ]
        found = self._exchanged(going, coming, parts)
        return {one.name: values for (one, _), values in found}

    def _exchanged(
        self,
        going: Sequence[tuple[int, Tensor]],
        coming: Sequence[tuple[int, int, tuple[SplitMatrix, MatrixPart]]],
        parts: Mapping[str, Tensor],
    ) -> list[tuple[tuple[SplitMatrix, MatrixPart], Tensor]]:
        """One all-to-all of (rank, values); what comes is (rank, numel, label). Collective."""
        if not self.split:
            return []
        size = self._axis.size
        pieces_sent = sorted(going, key=lambda item: item[0])
        arriving = sorted(coming, key=lambda item: item[0])
        given_splits = [0] * size
        for to, piece in pieces_sent:
            given_splits[to] += piece.numel()
        taken_splits = [0] * size
        for rank, numel, _ in arriving:
            taken_splits[rank] += numel
        like = next(iter(parts.values()), torch.empty(0, dtype=torch.bfloat16))
        source = torch.cat([one for _, one in pieces_sent]) if pieces_sent else like.new_empty(0)
        out = source.new_empty(sum(taken_splits))
        self._axis.all_to_all(out, source, taken_splits, given_splits).wait()
        values = out.split([numel for _, numel, _ in arriving]) if arriving else ()
        return [(label, one) for (_, _, label), one in zip(arriving, values, strict=True)]


def _cut(places: Sequence[MatrixPlace], count_of: CountOf) -> list[UnitPart]:
    """The units of a rank's parts."""
    return [part for one in places for part in units_of(one, count_of(one.name, one.shape))]


def place_of(shard: Shard) -> MatrixPlace:
    """The place of a shard, without its values."""
    shape = tuple(shard.global_shape)
    return MatrixPlace(shard.name, shape, shard.box, shard.start, shard.stop, shard.view)


def _regions(whole: Tensor, place: MatrixPlace) -> list[Tensor]:
    """The elements of a part inside the flat matrix, as views in the part's order."""
    shape = place.shape if place.view is None else place.view
    viewed = whole.view(shape)
    everything = Box.whole(shape)
    rectangles = FlatRange(place.box, place.start, place.stop).rectangles()
    return [viewed[one.box.within(everything)] for one in rectangles]


def _read(whole: Tensor, place: MatrixPlace) -> Tensor:
    """The elements of a part, as one flat tensor."""
    regions = [region.reshape(-1) for region in _regions(whole, place)]
    return regions[0] if len(regions) == 1 else torch.cat(regions)


def _write(whole: Tensor, place: MatrixPlace, values: Tensor) -> None:
    """Set the elements of a part from a flat tensor of them."""
    regions = _regions(whole, place)
    flat = values.split([region.numel() for region in regions])
    for region, part in zip(regions, flat, strict=True):
        region.copy_(part.view(region.shape))
