"""A loss whose terms have counts of their own is one device's, where targets bring the counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

NUM_BOXES = (1, 3, 2, 4)


def loss(output: Tensor, targets: tuple[plait.SampleList, Tensor, Tensor]) -> Tensor:
    boxes, boxes_per_sample, classes = targets
    apart = [
        F.l1_loss(row[: len(box)], box, reduction="sum")
        for row, box in zip(output, boxes, strict=True)
    ]
    distance = torch.stack(apart).sum() / boxes_per_sample.sum()
    return distance + F.cross_entropy(output, classes)


@pytest.mark.parametrize("plan", ["mb2", "mb4"])
def test_counts_of_the_whole_batch_divide_each_part(plan: str) -> None:
    boxes = plait.SampleList([torch.randn(number) for number in NUM_BOXES])
    per_sample = torch.full((4,), sum(NUM_BOXES) / 4)
    batch = torch.randn(4, 3), (boxes, per_sample, torch.randint(0, 5, (4,)))
    losses = []
    for one in ("dp1", plan):
        torch.manual_seed(0)
        model = nn.Linear(3, 5)
        engine = plait.build(model, one, loss=loss, optimizer=torch.optim.SGD)
        losses.append([engine.step(batch).loss for _ in range(3)])
        engine.world.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
