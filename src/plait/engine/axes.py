"""Which ranks do what alike: products of axes by their use, so that no other file spells them."""

from __future__ import annotations

from plait.comm import Axis, World


def data_axis(world: World, outer: str = "dp") -> Axis:
    """The ranks that have other tokens and the same dense parameters: `outer` x cp. Gradients are summed over them."""
    return world.axis((outer, "cp")) if world.mesh.cp > 1 else world.axis(outer)
