"""Why a layer stays whole is said with the operation, the tensor and the dimension."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.models.derived.cuts import Cut, in_words
from plait.models.derived.table import derive


class Between(nn.Module):
    """Two linear layers, and code between them."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden), nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> the same."""
        y: Tensor = self.down(self.code(self.up(x)))
        return y

    def code(self, h: Tensor) -> Tensor:
        """[samples, hidden] -> the same."""
        return h


class OfSums(Between):
    """Running sums over the features."""

    def code(self, h: Tensor) -> Tensor:
        """[samples, hidden] -> the same."""
        return h.cumsum(-1)


class OfNoise(Between):
    """Noise on the features."""

    def code(self, h: Tensor) -> Tensor:
        """[samples, hidden] -> the same."""
        return h + torch.randn_like(h)


class OfWeight(Between):
    """The weight of a layer in a function."""

    def code(self, h: Tensor) -> Tensor:
        """[samples, hidden] -> the same."""
        return F.linear(h @ self.down.weight.T, self.down.weight.T)


class OfCheckpoint(Between):
    """Dropout that a backward runs again."""

    def code(self, h: Tensor) -> Tensor:
        """[samples, hidden] -> the same."""
        dropped: Tensor = checkpoint(F.dropout, h, 0.5, self.training, use_reentrant=False)
        return dropped


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Between(7), "2 ranks do not divide the 7 input features of 'down'"),
        (OfSums(), "cumsum reduces dimension 1 of [3, 8], of which each rank has a part"),
        (OfNoise(), "randn_like draws random numbers for dimension 1 of [3, 8]"),
        (OfWeight(), "uses the weight of 'down' outside of a call of it, as by F.linear"),
        (OfCheckpoint(), "leave the checkpoint out and write remat:full in the plan"),
    ],
)
def test_a_note_names_what_keeps_a_layer_whole(model: nn.Module, why: str) -> None:
    table = derive(model.train(), lambda: model(torch.ones(3, 4)), 2)
    assert any(why in note for note in table.notes), table.notes


def test_demands_in_words() -> None:
    assert in_words(Cut(1, ((64, True), (32, False)))) == "cut along dimension 1 in parts 64+32!"
    assert in_words(Cut(2, ((64, True),))) == "cut along dimension 2"
    assert in_words("alike") == "whole"
