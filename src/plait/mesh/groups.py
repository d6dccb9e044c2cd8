"""Process groups for axes: the one place where torch groups are made.

`new_group` is collective over the whole world. So every rank makes all lines of an axis at once, in
the mesh's order, at the first request. Axes with the same lines (dp and dp x cp when cp is 1) share
one group.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from plait.mesh.mesh import AxisName, Mesh


class Groups:
    """The process groups of one rank, made lazily. The first request for an axis is a collective
    call of all ranks.
    """

    def __init__(self, mesh: Mesh, rank: int, timeout_seconds: float) -> None:
        self.mesh = mesh
        self.rank = rank
        self._timeout = timedelta(seconds=timeout_seconds)
        self._made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def group(self, axis: AxisName) -> dist.ProcessGroup:
        """The group of this rank's line of `axis`; its members are in the order of their
        coordinates.
        """
        lines = self.mesh.lines(axis)
        everyone = tuple(range(self.mesh.size))
        if lines == (everyone,):
            world = dist.group.WORLD
            assert world is not None  # `comm.init` joined it
            return world
        if lines not in self._made:
            for line in lines:
                made = dist.new_group(list(line), timeout=self._timeout)
                if self.rank in line:
                    self._made[lines] = made
        return self._made[lines]

    def across(self, axis: AxisName, block: int) -> dist.ProcessGroup:
        """A new group of the ranks of this rank's line of `axis` with its place in blocks of
        `block` ranks. Collective of all ranks.
        """
        columns = [line[place::block] for line in self.mesh.lines(axis) for place in range(block)]
        made = {ranks: dist.new_group(list(ranks), timeout=self._timeout) for ranks in columns}
        return next(group for ranks, group in made.items() if self.rank in ranks)

    def close(self) -> None:
        """Forget the groups; the process group itself is destroyed by its owner."""
        self._made.clear()
