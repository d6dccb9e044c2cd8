"""Losses are sums with counts: adding parts equals the whole, however uneven the parts and their
masks.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from plait.errors import ModelError
from plait.models.losses import IGNORE, cross_entropy, mse


def test_cross_entropy_of_uneven_parts_adds_up_to_the_mean_of_the_whole() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 5, 7, dtype=torch.float64)
    targets = torch.randint(0, 7, (6, 5))
    targets[0] = targets[2, 1:] = targets[5, :3] = IGNORE
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    parts = [
        cross_entropy(x, y)
        for x, y in zip(logits.split([1, 2, 3]), targets.split([1, 2, 3]), strict=True)
    ]
    assert [int(count) for _, count in parts] == [0, 6, 12]
    total, count = (torch.stack(column).sum() for column in zip(*parts, strict=True))
    torch.testing.assert_close(total / count, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_cross_entropy_computes_in_float32_at_least(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 9).to(dtype)
    total, _ = cross_entropy(logits, torch.tensor([1, 2, 3, 4]))
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_nothing_counted_is_zero_with_a_gradient() -> None:
    for logits, targets in [
        (torch.randn(0, 3, 5, requires_grad=True), torch.zeros(0, 3, dtype=torch.long)),
        (torch.randn(2, 5, requires_grad=True), torch.full((2,), IGNORE)),
    ]:
        total, count = cross_entropy(logits, targets)
        total.backward()
        assert (total.item(), count.item()) == (0, 0)
        assert logits.grad is not None
        assert not logits.grad.any()


def test_mse_sums_samples_and_averages_features() -> None:
    output = torch.randn(5, 2, 3)
    target = torch.randn(5, 2, 3)
    total, count = mse(output, target)
    assert int(count) == 5
    torch.testing.assert_close(total / count, F.mse_loss(output, target))
    total, count = mse(output[:0], target[:0])
    assert (total.item(), count.item()) == (0, 0)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ModelError, match=r"logits are \[2, 3, 7\], the targets \[2, 4\]"):
        cross_entropy(torch.zeros(2, 3, 7), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ModelError, match=r"class numbers as targets, not torch.float32"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ModelError, match=r"the output is \[2, 3\], the target \[2\]"):
        mse(torch.zeros(2, 3), torch.zeros(2))
