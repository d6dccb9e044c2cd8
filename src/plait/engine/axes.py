"""Which ranks do what alike: products of axes by their use, so that no other file spells them."""

from __future__ import annotations

from plait.comm import Axis, World


def data_axis(world: World, outer: str = "dp") -> Axis:
    """The ranks that have other tokens and the same dense parameters: `outer` x cp. Gradients are
    summed over them.
    """
    return world.axis((outer, "cp")) if world.mesh.cp > 1 else world.axis(outer)


def within_stage(world: World) -> Axis:
    """The ranks that share a stage of the pipeline: data x context x tensor."""
    names = [name for name in ("dp", "cp", "tp") if name == "dp" or getattr(world.mesh, name) > 1]
    return world.axis(tuple(names) if len(names) > 1 else "dp")
