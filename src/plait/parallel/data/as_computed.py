"""Gradients that stay as backward computed them: those of one rank, made by one backward a step.

Nothing is added to them. In float32 they would be the same numbers, in twice the memory, after one
more pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm import Axis
from plait.parallel.data.gradients import BucketState, MainGrad, PersistentGradients


class GradientsAsComputed(PersistentGradients):
    """Gradients in `param.grad`, in the precision of the layers, from backward to the next step.

    A step may have several backwards all the same. From the second one on gradients are added up in
    the masters' precision. Their buffers take memory for that step alone.

    Attributes:
        adds_up: whether the running step has had a second backward.
    """

    def __init__(
        self, states: Sequence[BucketState], axis: Axis, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(states, axis, dtype, device)
        self._states = states
        self._frees = True
        self.adds_up = False
        for state in states:
            state.free()

    def begin_step(self, states: Sequence[BucketState]) -> None:
        super().begin_step(states)
        self.adds_up = False
        for slot in (slot for state in states for slot in state.bucket.slots):
            slot.param.grad = None

    def take(self, state: BucketState, index: int, param: Tensor) -> None:
        if self.adds_up:
            super().take(state, index, param)

    def before_forward(self) -> None:
        """A forward begins. Gradients of an earlier one are kept to be added to."""
        if self.adds_up or not any(state.touched for state in self._states):
            return
        self.adds_up = True
        for state in self._states:
            for index, slot in enumerate(state.bucket.slots):
                if slot.param.grad is not None:
                    super().take(state, index, slot.param)

    def collect(self, state: BucketState) -> None:
        if self.adds_up:
            super().collect(state)

    def main_grad(self, state: BucketState, index: int) -> MainGrad | None:
        return None

    def live(self) -> list[Tensor]:
        """The gradients that take memory now, each of its parameter's shape or a flat buffer."""
        if self.adds_up:
            return [state.grad for state in self._states if state.grad is not None]
        slots = (slot for state in self._states for slot in state.bucket.slots)
        return [slot.param.grad for slot in slots if slot.param.grad is not None]
