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
from plait.mesh.matrices import MatrixPart, MatrixPlace, SplitMatrix, share_matrices
from plait.plan import Plan
from plait.plan.facts import STRATEGIES

MATRIX = 2
WholeFunction = Callable[[Tensor], Tensor]


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
        own = [_place(shard) for shard in shards if len(shard.global_shape) == MATRIX]
        self._places: list[list[MatrixPlace]] = axis.gather_objects(own)
        self._matrices = share_matrices(self._places).split

    def restrict(self, wanted: Callable[[str], bool]) -> None:
        """Share only the matrices of these names among owners, as the others never travel.

        Every rank gives the same function of a name.
        """
        self._matrices = share_matrices(self._places, wanted).split

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
            (part.rank, part.place.numel, (one, part))
            for one in used
            if one.owner == me
            for part in one.parts
            if part.sends
        ]
        wholes: dict[str, Tensor] = {}
        for (one, part), values in self._exchanged(going, coming, parts):
            if one.name not in wholes:
                wholes[one.name] = values.new_empty(math.prod(one.shape))
            _write(wholes[one.name], part.place, values)
        return {name: whole.view(self._matrices[name].shape) for name, whole in wholes.items()}

    def _scattered(
        self, parts: Mapping[str, Tensor], made: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """This rank's parts of the results."""
        me = self._axis.rank
        going = [
            (part.rank, _read(made[one.name], part.place))
            for one in self._matrices.values()
            if one.name in made
            for part in one.parts
        ]
        coming = [
            (one.owner, mine.place.numel, (one, mine))
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
        pieces_sent = sorted(going, key=lambda item: item[0])
        arriving = sorted(coming, key=lambda item: item[0])
        given_splits = [0] * size
        for to, piece in pieces_sent:
            given_splits[to] += piece.numel()
        taken_splits = [0] * size
        for rank, numel, _ in arriving:
            taken_splits[rank] += numel
        empty = torch.empty(0, dtype=torch.bfloat16)
        source = torch.cat([one for _, one in pieces_sent]) if pieces_sent else empty
        out = source.new_empty(sum(taken_splits))
        self._axis.all_to_all(out, source, taken_splits, given_splits).wait()
        values = out.split([numel for _, numel, _ in arriving]) if arriving else ()
        return [(label, one) for (_, _, label), one in zip(arriving, values, strict=True)]


def _place(shard: Shard) -> MatrixPlace:
    rows, columns = shard.global_shape
    return MatrixPlace(shard.name, (rows, columns), shard.box, shard.start, shard.stop, shard.view)


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
