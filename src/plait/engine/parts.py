"""What one rank holds of each parameter or gradient, as ranges of elements: the form that proof and checkpoints share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from plait.data import DataStrategy
from plait.engine.holding import Holding


@dataclass(frozen=True)
class LocalPart:
    """Elements [start, stop), in row-major order, of the tensor `name` of shape `global_shape`; `value` is 1-D."""

    name: str
    global_shape: tuple[int, ...]
    start: int
    stop: int
    value: Tensor

    def share(self, index: int, count: int) -> LocalPart:
        """Part `index` of `count` parts of (nearly) equal length."""
        numel = self.stop - self.start
        low, high = index * numel // count, (index + 1) * numel // count
        return LocalPart(self.name, self.global_shape, self.start + low, self.start + high, self.value[low:high])


def local_parameters(strategy: DataStrategy, holding: Holding) -> list[LocalPart]:
    """Every parameter that this rank holds or shares in, trainable ones in master precision."""
    parts = [
        LocalPart(piece.name, tuple(piece.part.slot.shape), piece.part.start, piece.part.stop, piece.value.detach().reshape(-1))
        for piece in strategy.pieces
    ]
    return [*parts, *local_frozen(strategy, holding)]


def local_frozen(strategy: DataStrategy, holding: Holding) -> list[LocalPart]:
    """The parameters that no optimizer updates."""
    sharded = strategy.frozen_pieces()
    if strategy.frozen_states:
        return [
            LocalPart(piece.name, tuple(piece.part.slot.shape), piece.part.start, piece.part.stop, piece.value)
            for piece in sharded
        ]
    return [_whole(name, param) for name, param in holding.params.items() if not param.requires_grad]


def local_buffers(holding: Holding) -> list[LocalPart]:
    """The buffers of this rank's modules that are part of the model's state."""
    return [_whole(name, buffer) for name, buffer in holding.buffers().items()]


def local_gradients(strategy: DataStrategy, divisor: float) -> list[LocalPart]:
    """The gradients that this rank's optimizer will see, divided by `divisor`; parameters without one are left out."""
    return list(_gradients(strategy, divisor))


def _gradients(strategy: DataStrategy, divisor: float) -> Iterator[LocalPart]:
    for piece in strategy.pieces:
        grad = piece.value.grad
        if grad is not None:
            shape = tuple(piece.part.slot.shape)
            yield LocalPart(piece.name, shape, piece.part.start, piece.part.stop, grad.detach().reshape(-1) / divisor)


def _whole(name: str, tensor: Tensor) -> LocalPart:
    return LocalPart(name, tuple(tensor.shape), 0, tensor.numel(), tensor.detach().reshape(-1))
