"""A NumPy array in a batch is refused: no rank would take its own samples of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import plait
from plait.errors import DataError
from plait.values import PyTree

ARRAY = np.ones((4, 3), dtype=np.float32)
BATCHES: list[PyTree] = [
    (ARRAY, ARRAY),
    (torch.ones(4, 3), ARRAY),
    {"input": torch.ones(4, 3), "y": torch.ones(4, 3), "weight": ARRAY},
]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("plan", ["dp1", "mb2"])
def test_an_array_is_named(plan: str, batch: PyTree) -> None:
    engine = plait.build(
        torch.nn.Linear(3, 3),
        plan,
        loss=lambda output, targets: F.mse_loss(output, torch.as_tensor(targets)),
        optimizer=torch.optim.SGD,
    )
    with pytest.raises(DataError, match=r"a NumPy array of shape \(4, 3\)") as caught:
        engine.step(batch)
    assert "torch.as_tensor(array)" in str(caught.value)
    engine.world.close()


def test_a_number_of_numpy_stays_a_number() -> None:
    engine = plait.build(
        torch.nn.Linear(3, 3),
        "mb2",
        loss=lambda output, batch: F.mse_loss(output, batch["y"]) * batch["scale"],
        optimizer=torch.optim.SGD,
    )
    one = {"input": torch.ones(4, 3), "y": torch.ones(4, 3), "scale": float(np.float64(1.0))}
    twice = {**one, "scale": np.float64(2.0)}
    assert engine.evaluate(twice) == pytest.approx(2 * engine.evaluate(one))
    engine.world.close()
