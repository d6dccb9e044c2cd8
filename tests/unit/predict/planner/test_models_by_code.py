"""A tensor axis is chosen for models that code makes where it divides layers of theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.predict.planner.choose import decide

CLUSTER = "h100x2"


class Convolutions(nn.Module):
    """Layers of which a tensor axis divides none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(1, 1, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


class Perceptrons(nn.Module):
    """Pairs of layers over tokens, which a tensor axis divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64)) for _ in range(4)
        )
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def convolutions() -> nn.Module:
    return Convolutions()


def perceptrons(width: int = 256) -> nn.Module:
    return Perceptrons(width)


def signals() -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(1, 64), torch.zeros(1, 64))] * 64


def asked(function: str, data: dict[str, object], **arguments: int) -> dict[str, object]:
    return {
        "model": {"python": f"{__name__}:{function}", "arguments": arguments},
        "data": data,
        "train": {"global_batch": 16, "loss": "torch.nn.functional:mse_loss"},
    }


TEXT = {"name": "stdlib", "seq_len": 128}
SIGNALS = {"python": f"{__name__}:signals"}


def degrees_of(config: dict[str, object]) -> set[int]:
    """The tensor degrees of all plans that are answered."""
    return {one.plan.tp.size for one in plait.choose(config, CLUSTER, top=99)}


def test_a_tensor_axis_that_divides_no_layer_is_not_chosen() -> None:
    assert degrees_of(asked("convolutions", SIGNALS)) == {1}


def test_a_tensor_axis_that_divides_layers_is_looked_at() -> None:
    assert decide(asked("perceptrons", TEXT), CLUSTER, fix="tp2").plans


@pytest.mark.parametrize("width", [255, 257])
def test_a_tensor_axis_that_leaves_a_rest_is_not_chosen(width: int) -> None:
    assert degrees_of(asked("perceptrons", TEXT, width=width)) == {1}
