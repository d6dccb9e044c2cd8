"""The MLP's layers, and the pairs that tensor parallelism reads off their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait import models


@pytest.mark.parametrize(
    ("num", "names"),
    [(1, ["linear"]), (2, ["up", "down"]), (5, ["up", "down", "up", "down", "linear"])],
)
def test_layers_pair_up_and_an_odd_one_stays_alone(num: int, names: list[str]) -> None:
    model = models.make("mlp", in_features=3, hidden_size=8, num_hidden_layers=num, out_features=2)
    assert [
        next(name for name, child in block.named_children() if isinstance(child, nn.Linear))
        for block in model.blocks
    ] == names
    expected = (3 * 8 + 8) + (num - 1) * (8 * 8 + 8) + (8 * 2 + 2)
    assert sum(param.numel() for param in model.parameters()) == expected
    assert model(torch.randn(4, 3)).shape == (4, 2)
