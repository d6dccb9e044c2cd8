"""Blocks that no graph holds whole, under `compile remat:selective`: backward finds their state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from tests.helpers.sgd import drawn_batch, on_one_device, three_losses
from tests.parity.harness import TOLERANCE
from tests.parity.test_recompute_of_arguments import Handing, Keeping, in_dictionary
from tests.parity.test_selective_in_place import Products, added


class Counting(nn.Module):
    """A block that fades out by the number of its forwards, which it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        result: Tensor = x + self.linear(x).tanh() / self.count
        return result


def blocks_of(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), make(), make(), nn.Linear(6, 6))


MODELS = {
    "a count": lambda: blocks_of(Counting),
    "a list": lambda: blocks_of(lambda: Keeping([])),
    "a tensor": lambda: blocks_of(lambda: Keeping(torch.zeros(1, 6).double())),
    "a dictionary": lambda: Handing(in_dictionary),
    "a product": lambda: blocks_of(lambda: Products(added, bias=False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_backward_finds_the_state_of_the_forward(name: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = MODELS[name]().double()
    batch = drawn_batch(8)
    expected = on_one_device(copy.deepcopy(model), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = plait.build(
            model,
            "compile remat:selective precision:float64",
            loss=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            options=plait.Options(compile_backend="aot_eager"),
        )
        found = three_losses(engine, batch)
    engine.world.close()
    assert found == pytest.approx(expected, rel=TOLERANCE)
