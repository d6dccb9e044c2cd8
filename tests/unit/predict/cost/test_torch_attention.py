"""Torch's attention is counted as a whole: its products, and what a tensor axis divides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from plait.predict.cost.model.blocks import flops
from plait.predict.cost.model.modules import describe_by_running
from plait.predict.cost.model.operations import Attention, Matmul

LENGTH, WIDTH, HEADS = 12, 32, 4
ROLES = {"": "whole", "blocks.*.attn": "heads", "blocks.*.attn.out_proj": "row"}


class Attending(nn.Module):
    """A block of torch's attention alone, of one sequence or of two."""

    def __init__(self, *, crossed: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.crossed = crossed

    def forward(self, x: Tensor) -> Tensor:
        """[samples, positions, width] -> the same."""
        other = x.flip(1) if self.crossed else x
        y: Tensor = x + self.attn(x, other, other)[0]
        return y


class Attenders(nn.Module):
    """Two such blocks behind an embedding."""

    def __init__(self, *, crossed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Attending(crossed=crossed) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """[samples, positions] -> [samples, positions, width]."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("crossed", [False, True])
def test_products_are_those_that_torch_counts(crossed: bool) -> None:
    module = Attenders(crossed=crossed)
    with torch.device("meta"), FlopCounterMode(display=False) as counted:
        Attenders(crossed=crossed)(torch.zeros(2, LENGTH, dtype=torch.long))
    described = describe_by_running(module, LENGTH, ROLES)
    rows = [
        flops(block, described.seq_len)[0] for block, count in described.runs for _ in range(count)
    ]
    assert 2 * sum(rows) == counted.get_total_flops()
    assert described.parameters == sum(param.numel() for param in module.parameters())


@pytest.mark.parametrize(
    ("roles", "splits"), [(ROLES, ["column", "row"]), ({"": "whole"}, ["none", "none"])]
)
def test_a_tensor_axis_divides_heads_that_are_split(
    roles: dict[str, str], splits: list[str]
) -> None:
    described = describe_by_running(Attenders(crossed=False), LENGTH, roles)
    block = described.runs[1][0]
    products = [one for one in block.operations if isinstance(one, Matmul)]
    assert [one.split for one in products] == splits
    assert [(one.inputs, one.outputs) for one in products] == [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH)]
    assert [one.num_heads for one in block.operations if isinstance(one, Attention)] == [HEADS]
