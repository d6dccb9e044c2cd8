"""The part of the model that this rank holds: the modules of its stages, or all without a pipeline.

The module tree stays whole on every rank, so that names are the model's own. Parameters of other
stages take no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.mesh import Shard
from plait.parallel.data import Replicas
from plait.parallel.tensor import Placement


@dataclass(frozen=True)
class LocalParameters:
    """The parameters and buffers of one rank, by their names in the model.

    Attributes:
        model: the whole module tree.
        params: the parameters held here.
        shapes: of every parameter and persistent buffer of the model, on every rank.
        buffer_names: the persistent buffers held here.
        tied_copies: names that an earlier stage holds too, and saves.
        placements: where in the whole parameters those of this rank lie, by name. It is empty when
            layers are not split.
        copies: of frozen parameters that several stages of this rank use, those beside the one in
            `params`.
    """

    model: nn.Module
    params: Mapping[str, nn.Parameter]
    shapes: Mapping[str, tuple[int, ...]]
    buffer_names: frozenset[str]
    tied_copies: frozenset[str] = frozenset()
    placements: Mapping[str, Placement] = field(default_factory=dict)
    copies: Mapping[str, list[nn.Parameter]] = field(default_factory=dict)

    @classmethod
    def whole(cls, model: nn.Module) -> LocalParameters:
        """Everything."""
        shapes, buffers = shapes_of(model)
        return cls(model, dict(model.named_parameters()), shapes, buffers)

    def shard(self, local: Shard) -> Shard:
        """A shard of a tensor that this rank has, as a shard of the model's whole tensor."""
        placement = self.placements.get(local.name)
        return local if placement is None else placement.shard(local)

    def replicas(self, name: str) -> Replicas:
        """The ranks of the tensor axis that hold the same elements of a parameter."""
        placement = self.placements.get(name)
        return Replicas(1, 0) if placement is None else Replicas(placement.copies, placement.copy)

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers held here, as they are now, each [...]."""
        if not self.buffer_names:  # as most: a walk through all modules takes its time at each save
            return {}
        return {
            name: buffer for name, buffer in self.model.named_buffers() if name in self.buffer_names
        }


def shapes_of(model: nn.Module) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """Shapes of all parameters and persistent buffers, and the names of the latter.

    Raises `ModelError` for a sparse buffer, which no checkpoint holds.
    """
    persistent = model.state_dict(keep_vars=True).keys()
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    for name, buffer in buffers.items():
        if buffer.layout is not torch.strided:
            layout = str(buffer.layout).removeprefix("torch.")
            raise ModelError(
                f"the buffer {name!r} is {layout}, and a checkpoint holds dense ones; register it "
                "with persistent=False, or make it dense"
            )
    sizes = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    return shapes | sizes, frozenset(sizes)
