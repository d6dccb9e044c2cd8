"""Torch's encoder layers, which one fused operation computes in evaluation, under plans that cut
models or sequences.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import build
from plait.models import losses
from tests.helpers.threaded import threaded
from tests.parity.harness import TOLERANCE


class Encoder(nn.Module):
    """Attends to all places, or to those whose token is not 0 where it `pads`.

    Torch makes nested tensors of padded places in evaluation.
    """

    def __init__(self, pads: bool) -> None:
        super().__init__()
        self.pads = pads
        self.embed = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = ids == 0 if self.pads else None
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=hidden))


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 32, (8, 9), generator=torch.Generator().manual_seed(3))
    inputs, targets = ids[:, :-1].clone(), ids[:, 1:].clone()
    inputs[::2, 5:] = 0
    targets[::2, 5:] = losses.IGNORE
    return inputs, targets


def on_rank(world: World, plan: str, model: nn.Module) -> float:
    engine = build(
        copy.deepcopy(model),
        f"{plan} precision:float64",
        loss=losses.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    return engine.evaluate(batch())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("plan", ["cp2:ring", "cp2:ulysses", "tp2", "pp2:1f1b mb2"])
def test_an_evaluation_equals_one_device(plan: str, pads: bool) -> None:
    torch.manual_seed(0)
    model: Any = Encoder(pads).double().eval()
    inputs, targets = batch()
    with torch.no_grad():
        total, count = losses.cross_entropy(model(inputs), targets)
    for loss in threaded(2, on_rank, plan, model.train(), plan=plan):
        assert loss == pytest.approx(float(total / count), rel=TOLERANCE)
