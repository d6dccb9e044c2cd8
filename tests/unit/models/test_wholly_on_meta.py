"""What a library makes by calls that take no default device comes to the meta device."""

from __future__ import annotations

import torch
from torch import nn

from plait.engine.state.init import is_meta
from plait.models.weights import wholly_on_meta


class Offsets(nn.Module):
    """A parameter, and numbers of positions that stay on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.register_buffer("places", torch.LongTensor([0, 2, 1]), persistent=False)


def test_buffers_come_along() -> None:
    with torch.device("meta"):
        model = Offsets()
    assert not model.places.is_meta
    model = wholly_on_meta(model)
    assert is_meta(model) and model.places.shape == (3,) and model.places.dtype == torch.int64
    assert "places" not in model.state_dict()
