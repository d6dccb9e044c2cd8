"""Code between modules that reads results as numbers: later stages read what one device reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import plait
from plait.comm import World
from plait.errors import ModelError, RankFailed
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]


class Scaled(nn.Module):
    """Scales the last result by the largest number of the first, with the sign of its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[samples, 6, 4] and [samples] -> [samples, 6, 4]."""
        first = self.layers[0](x)
        scale = 1.0 + first.abs().max().item()
        sign = 1.0 if first.mean() > 0 else -1.0
        y: Tensor = self.layers[2](self.layers[1](first).relu())
        return y * scale * sign


class Unpacked(nn.Module):
    """Unpacks the result of an LSTM between the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4), nn.Linear(4, 4)]
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[samples, 6, 4] and [samples] -> [samples, 6, 4]."""
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.layers[0](packed)
        hidden, _ = pad_packed_sequence(packed, batch_first=True, total_length=6)
        y: Tensor = self.layers[2](hidden.relu() + self.layers[1](hidden))
        return y


def losses(
    world: World, kind: type[nn.Module], plan: str, counts: tuple[int, ...], lengths: list[int]
) -> list[float] | str:
    """The losses of three steps, or the refusal."""
    torch.manual_seed(3)
    engine = plait.build(
        kind().double(),
        f"{plan} precision:float64",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=plait.Options(blocks="layers.*", cutting=plait.Cutting(counts=counts)),
        world=world,
    )
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4, 6, 4, generator=draw, dtype=torch.float64)
    batch = ((x, torch.tensor(lengths)), torch.ones_like(x))
    try:
        return [engine.step(batch).loss for _ in range(3)]
    except (ModelError, RankFailed) as error:
        return str(error)


@pytest.mark.parametrize("kind", [Scaled, Unpacked])
@pytest.mark.parametrize("counts", [(1, 2), (2, 1)])
def test_equals_one_device(ranks: Run, kind: type[nn.Module], counts: tuple[int, ...]) -> None:
    lengths = [6, 4, 6, 4]
    (alone,) = ranks(1, losses, kind, "mb2", (), lengths, plan="mb2")
    plan = "pp2:1f1b mb2"
    for found in ranks(2, losses, kind, plan, counts, lengths, plan=plan):
        assert found == pytest.approx(alone, rel=TOLERANCE, abs=0)


def test_lengths_that_change_what_is_sent_are_refused(ranks: Run) -> None:
    plan = "pp2:1f1b mb2"
    found = ranks(2, losses, Unpacked, plan, (1, 2), [6, 6, 5, 2], plan=plan)
    assert "what a stage returns must not change shape with values" in found[0]
