"""Dense parameters and experts of one stage: two data strategies over different ranks.

Dense gradients are summed over dp x cp. An expert lives on few of those ranks, and is summed over
these alone (edp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from plait.comm import World
from plait.mesh.boxes import Box
from plait.models.experts import mixtures
from plait.parallel.data import DataGroup, Unit
from plait.parallel.expert import AllToAllGroups, ExpertPart, ExpertSplit, Placer, Placing
from plait.parallel.tensor import Placement, TensorSplit


def separate(units: Sequence[Unit], names: set[str]) -> tuple[list[Unit], list[Unit]]:
    """(dense, experts): the parameters called `names` in units of their own, used by the experts'
    modules alone.
    """
    dense = []
    experts = []
    for unit in units:
        separated = [(name, param) for name, param in unit.params if name in names]
        kept = [(name, param) for name, param in unit.params if name not in names]
        dense.append(replace(unit, params=kept))
        if separated:
            experts.append(
                Unit(
                    f"{unit.name} experts",
                    True,
                    separated,
                    _users(unit.modules, {id(param) for _, param in separated}),
                    unit.keep,
                )
            )
    return dense, experts


def _users(modules: Sequence[nn.Module], params: set[int]) -> list[nn.Module]:
    inside = [part for module in modules for part in module.modules()]
    return [part for part in inside if _own_ids(part) & params]


def _own_ids(module: nn.Module) -> set[int]:
    return {id(param) for param in module.parameters(recurse=False)}


def expert_groups(world: World) -> AllToAllGroups:
    """The expert axis, in two hops where it spans nodes. Collective."""
    if not world.mesh.experts_span_nodes:
        return AllToAllGroups(world.axis("ep"))
    return AllToAllGroups(world.axis("ep"), world.axis("ep_local"), world.axis("ep_nodes"))


def make_placer(model: nn.Module, world: World, placing: Placing) -> Placer:
    """The planner that moves the experts of a split model."""
    mesh = world.mesh
    num_nodes = mesh.axis_size("ep_nodes") if mesh.experts_span_nodes else 1
    return Placer(mixtures(model), world.axis("ep").size, num_nodes, placing)


def expert_group(dense: DataGroup, world: World) -> DataGroup:
    """The ranks that hold the same experts."""
    axis = world.axis("edp")
    return DataGroup(
        axis=axis,
        shard=axis,
        replicate=world.axis(()),
        param_dtype=dense.param_dtype,
        master_dtype=dense.master_dtype,
        device=dense.device,
        offload=dense.offload,
        eager=dense.eager,
        running_forward=dense.running_forward,
    )


def placements(experts: ExpertSplit | None, layers: TensorSplit | None) -> dict[str, Placement]:
    """The place of this rank's parameters in the whole ones: the tensor axis's box within the
    expert axis's box.
    """
    placements = {} if layers is None else dict(layers.placements)
    if experts is None:
        return placements
    for name, part in experts.parts.items():
        inner = placements.get(name)
        if inner is None:
            placements[name] = Placement(part.shape, part.view, part.box, part.local_shape, 1, 0)
        elif part.view != part.shape:
            placements[name] = _matrix(part, inner)
        else:  # the expert axis cuts the first dimension, and that alone
            first = part.box.offset[0] + inner.box.offset[0]
            whole = Box((first, *inner.box.offset[1:]), inner.box.extent)
            view = (part.shape[0], *inner.view[1:])
            placements[name] = replace(inner, shape=part.shape, view=view, box=whole)
    return placements


def _matrix(part: ExpertPart, inner: Placement) -> Placement:
    """The place of a matrix of an adapter, of which the tensor axis may cut the features.

    It is A [E r, in], whose experts are outermost, or B [out, r E], whose experts are innermost.
    """
    box = part.box
    if box.extent[0] < part.view[0]:
        view = (*part.view[:2], *inner.view[1:])
        offset = (*box.offset[:2], *inner.box.offset[1:])
        extent = (*box.extent[:2], *inner.box.extent[1:])
    else:
        view = (*inner.view[:-1], *part.view[1:])
        offset = (*inner.box.offset[:-1], *box.offset[1:])
        extent = (*inner.box.extent[:-1], *box.extent[1:])
    return replace(inner, shape=part.shape, view=view, box=Box(offset, extent))
