"""What this rank holds of the model: with a pipeline, the modules of its stages; else everything.

The module tree stays whole on every rank, so that names are the model's own; parameters of other stages take no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Holding:
    """The parameters and buffers of one rank, by their names in the model.

    Attributes:
        model: the whole module tree.
        params: the parameters held here.
        shapes: of every parameter and persistent buffer of the model, on every rank.
        buffer_names: the persistent buffers held here.
        secondary: names that an earlier stage holds too, and saves.
    """

    model: nn.Module
    params: Mapping[str, nn.Parameter]
    shapes: Mapping[str, tuple[int, ...]]
    buffer_names: frozenset[str]
    secondary: frozenset[str] = frozenset()

    @classmethod
    def whole(cls, model: nn.Module) -> Holding:
        """Everything."""
        shapes, buffers = shapes_of(model)
        return cls(model, dict(model.named_parameters()), shapes, buffers)

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers held here, as they are now."""
        return {name: buffer for name, buffer in self.model.named_buffers() if name in self.buffer_names}


def shapes_of(model: nn.Module) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """Shapes of all parameters and persistent buffers, and the names of the latter."""
    persistent = model.state_dict(keep_vars=True).keys()
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    buffers = {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in persistent}
    return shapes | buffers, frozenset(buffers)
