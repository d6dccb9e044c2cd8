"""A step of an engine's optimizer that its caller makes by hand.

Its parameters are this rank's parts. They get gradients in a step of the engine alone, and not from
`loss.backward()`. Behind a step of the engine they have those of that step still.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plait.errors import OptimizerError


class StepByHand:
    """A hook of an optimizer that refuses steps but those of the engine.

    Attributes:
        is_guard: the mark of a hook that changes nothing in a step.
    """

    is_guard = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_open = False
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            optimizer.register_step_pre_hook(self)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Allow steps, which the engine makes."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def __call__(self, optimizer: torch.optim.Optimizer, *given: object) -> None:
        """Raise `OptimizerError` for a step that the engine does not make."""
        if self._is_open:
            return
        raise OptimizerError(
            f"a step of the engine's {type(optimizer).__name__} was made by hand; its parameters "
            "are a rank's own parts, which loss.backward() does not reach, so it would train "
            "nothing, or use the gradients of the last engine.step again; call "
            "engine.step(batch), which is forward, backward and update, instead of both"
        )
