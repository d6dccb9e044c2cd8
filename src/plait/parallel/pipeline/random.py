"""Random numbers of a micro-batch that passes several stages: each goes on where the stage before
stopped.

So dropout is the same under every plan. The state travels only if a stage has drawn from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.parallel.pipeline.payload import Payload


class RandomState:
    """The generator that layers draw from on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seed(self, seed: int) -> Tensor:
        """Start from a seed; returns the state that this gives."""
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed asks every kind of device, and takes half a millisecond
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)
        return get_state(self._device)

    def pack(self, payload: Payload, fresh: Tensor) -> None:
        """Let the state travel with a payload if it is not the fresh one any more."""
        state = get_state(self._device) if payload.random is None else payload.random
        drawn = not torch.equal(state, fresh)
        if drawn:
            payload.tensors.append(state.to(self._device))
        payload.note = (payload.note, drawn)

    def unpack(self, payload: Payload) -> None:
        """Take the state out of a payload, and use it from here on."""
        payload.note, drawn = payload.note
        if drawn:
            state = payload.tensors.pop().cpu()
            payload.restore = lambda: self._set(state)
            payload.restore()

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)


def get_state(device: torch.device) -> Tensor:
    """A copy of the state of the default generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
