"""Accuracy: in parts, of samples that are dicts too, and none without classes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plait.outer.federated.evaluator import BATCH, Evaluator
from plait.outer.federated.samples import Subset


class Pairs:
    """Inputs and targets by index; inputs in a dict where asked."""

    def __init__(self, inputs: Tensor, targets: Tensor, *, in_dicts: bool = False) -> None:
        self._inputs = inputs
        self._targets = targets
        self._in_dicts = in_dicts

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> object:
        value = self._inputs[index]
        return {"input": value} if self._in_dicts else value, self._targets[index]


class Counting(nn.Linear):
    """A layer that notes the sizes of its batches."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.sizes: list[int] = []

    def forward(self, input: Tensor) -> Tensor:
        self.sizes.append(len(input))
        return super().forward(input)


def test_a_test_set_is_judged_in_parts() -> None:
    torch.manual_seed(0)
    model = Counting(4, 3)
    inputs = torch.randn(BATCH + 9, 4)
    targets = torch.randint(0, 3, (BATCH + 9,))
    targets[::5] = -100
    evaluator = Evaluator(model, 0, torch.float32)
    counted = targets != -100
    right = (model(inputs).argmax(-1) == targets) & counted
    model.sizes.clear()
    for in_dicts in (False, True):
        test = Subset(Pairs(inputs, targets, in_dicts=in_dicts), range(len(inputs)))
        accuracy = evaluator.accuracy(evaluator.initial(), test)
        assert accuracy == int(right.sum()) / int(counted.sum())
    assert model.sizes == [BATCH, 9] * 2


@pytest.mark.parametrize("targets", [torch.randn(5, 1), torch.zeros(5, dtype=torch.int64)])
def test_targets_that_are_no_classes_have_no_accuracy(targets: Tensor) -> None:
    evaluator = Evaluator(nn.Linear(4, 1), 0, torch.float32)
    test = Subset(Pairs(torch.randn(5, 4), targets), range(5))
    assert evaluator.accuracy(evaluator.initial(), test) is None
