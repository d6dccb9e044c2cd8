"""A model that returns its loss alone: its samples are counted in the targets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import ModelError
from plait.verify.outside.loss import summed


class ItsOwnLoss(nn.Module):
    """A classifier that takes the targets too, as wrappers for distillation do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), targets)


def as_it_is(output: Tensor, _: object) -> Tensor:
    return output


def test_a_loss_alone_is_weighed_by_the_targets() -> None:
    model = ItsOwnLoss()
    inputs, targets = torch.randn(6, 3), torch.arange(6) % 5
    as_sum, adds_up = summed(model, ((inputs, targets), targets), as_it_is)
    total, count = as_sum(model(inputs, targets), targets)
    assert adds_up and count == 6
    assert total.item() == pytest.approx(6 * model(inputs, targets).item())


def test_a_loss_alone_without_targets_is_refused() -> None:
    inputs, targets = torch.randn(6, 3), torch.arange(6) % 5
    with pytest.raises(ModelError, match=r"return \(sum, count\) from the loss"):
        summed(ItsOwnLoss(), ((inputs, targets), None), as_it_is)
