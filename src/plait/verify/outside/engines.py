"""Whole gradients and parameters of this library's own engines, in a training step of a user's.

An engine may hold flat shards and free its module's parameters between steps, as ZeRO-3 does. So
the shards of all ranks are joined, as for a plan that is verified by its config.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor
from torch.optim.optimizer import Optimizer

from plait.engine.engine import Engine
from plait.mesh import Shard
from plait.values import PyTree
from plait.verify.record.observe import assembled, gradients_of_engine, parameters_of


class EngineWatch:
    """The engines that are built while the watch is on."""

    def __init__(self) -> None:
        self.found: list[Engine] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have every new engine noted."""
        begin = Engine.__init__

        def noted(engine: Engine, *args: PyTree, **kwargs: PyTree) -> None:
            begin(engine, *args, **kwargs)
            self.found.append(engine)

        with patch.object(Engine, "__init__", noted):
            yield

    def of(self, optimizer: Optimizer) -> Engine | None:
        """The engine whose updates this optimizer makes."""
        return next((one for one in self._cut() if one.update.optimizer is optimizer), None)

    def params(self) -> dict[str, Tensor]:
        """The whole parameters [...] of all engines. Collective."""
        whole: dict[str, Tensor] = {}
        for engine in self._cut():
            whole |= _joined(engine, parameters_of(engine))
        return whole

    def _cut(self) -> list[Engine]:
        """The engines whose model is cut into stages; others hold no shards yet."""
        return [one for one in self.found if "update" in vars(one)]


def gradients(engine: Engine) -> dict[str, Tensor]:
    """The whole gradients [...] that the optimizer will see. Collective."""
    return _joined(engine, gradients_of_engine(engine))


def settings(engine: Engine) -> dict[str, dict[str, PyTree]]:
    """The group of the optimizer for every parameter that this rank owns a piece of."""
    names = {id(piece.value): piece.name for piece in engine.strategy.pieces}
    return {
        names[id(value)]: group
        for group in engine.update.optimizer.param_groups
        for value in group["params"]
        if id(value) in names
    }


def norms(engine: Engine) -> list[tuple[float, float]]:
    """(limit, norm) where the engine clips."""
    limit = engine.update.clip_grad_norm
    return [] if limit is None else [(limit, engine.grad_norm)]


def _joined(engine: Engine, own: Sequence[Shard]) -> dict[str, Tensor]:
    return assembled(engine.world.axis("world").gather_objects(own))
