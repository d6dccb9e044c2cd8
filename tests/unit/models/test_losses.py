"""Losses are sums with counts: adding parts equals the whole, however uneven the parts and their
masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.errors import ModelError
from plait.models import losses
from plait.models.losses import IGNORE, cross_entropy, mse
from plait.predict.cost.model import operations


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


ROWS, VOCABULARY = 13, 11


def of_two_ways(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, by_rows: bool
) -> tuple[Tensor, Tensor]:
    """The loss and its gradient, whole or by groups of two rows."""
    monkeypatch.setattr(losses, "LARGE_NUMEL", 0 if by_rows else 1 << 24)
    monkeypatch.setattr(losses, "GROUP_NUMEL", 2 * VOCABULARY)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, ROWS, VOCABULARY, generator=generator, dtype=torch.float64)
    logits = logits.to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (1, ROWS), generator=generator)
    targets[0, [1, 2, 12]] = IGNORE
    total, count = cross_entropy(logits, targets)
    assert int(count) == ROWS - 3
    (3.0 * total).backward()
    assert logits.grad is not None
    return total.detach(), logits.grad


def test_large_logits_by_groups_of_rows_equal_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, grad = of_two_ways(monkeypatch, torch.float64, by_rows=False)
    total, made = of_two_ways(monkeypatch, torch.float64, by_rows=True)
    torch.testing.assert_close(total, whole, rtol=1e-13, atol=0)
    torch.testing.assert_close(made, grad, rtol=1e-12, atol=1e-14)
    for dtype in (torch.bfloat16, torch.float32):
        whole, grad = of_two_ways(monkeypatch, dtype, by_rows=False)
        total, made = of_two_ways(monkeypatch, dtype, by_rows=True)
        assert (total.dtype, made.dtype) == (whole.dtype, grad.dtype)
        torch.testing.assert_close(total, whole)
        torch.testing.assert_close(made, grad)


class Large(TorchDispatchMode):
    """Counts tensors of so many elements that operations make in memory of their own."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.found: set[int] = set()
        self.alive: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.numel() >= self.numel:
                self.alive.append(one)  # so that no memory is used twice
                self.found.add(one.untyped_storage().data_ptr())
        return made


@pytest.mark.parametrize(("by_rows", "copies"), [(True, 1), (False, 3)])
def test_by_rows_the_gradient_alone_is_as_large_as_the_logits(
    monkeypatch: pytest.MonkeyPatch, by_rows: bool, copies: int
) -> None:
    monkeypatch.setattr(losses, "LARGE_NUMEL", 0 if by_rows else 1 << 24)
    monkeypatch.setattr(losses, "GROUP_NUMEL", 2 * VOCABULARY)
    logits = torch.randn(ROWS, VOCABULARY, requires_grad=True)
    targets = torch.zeros(ROWS, dtype=torch.long)
    with Large(logits.numel()) as seen:
        torch.autograd.grad(cross_entropy(logits, targets)[0], logits)
    seen.found.discard(logits.untyped_storage().data_ptr())
    assert len(seen.found) == copies


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_compiled_kernels_give_what_groups_of_rows_give(dtype: torch.dtype) -> None:
    """Plain functions here: the compiler changes how they run, not what they compute."""
    generator = torch.Generator().manual_seed(3)
    logits = (30 * torch.randn(7, 19, generator=generator)).to(dtype)
    targets = torch.randint(0, 19, (7,), generator=generator)
    targets[2] = losses.IGNORE
    largest, logs = losses._tops_and_logs(logits)
    expected = torch.logsumexp(logits.double(), -1)
    assert torch.allclose((largest + logs)[:, 0].double(), expected, rtol=1e-6)

    whole = logits.detach().requires_grad_()
    losses.cross_entropy_by_rows(whole, targets)[0].backward()
    counted = targets != losses.IGNORE
    columns = targets.masked_fill(~counted, 0)[:, None]
    made = losses._gradient_of_rows(logits, largest, logs, columns, counted.float()[:, None])
    assert whole.grad is not None
    assert torch.allclose(made.double(), whole.grad.double(), rtol=1e-2, atol=1e-6)
    assert made.dtype == dtype


def test_a_compiled_plan_takes_the_compiled_form_of_the_loss() -> None:
    assert losses.compiled(losses.cross_entropy) is losses.cross_entropy_compiled
    assert losses.compiled(losses.mse) is losses.mse
    logits = torch.randn(4, 5)
    found, count = losses.cross_entropy_compiled(logits, torch.tensor([0, 1, 2, -100]))
    expected, _ = losses.cross_entropy(logits, torch.tensor([0, 1, 2, -100]))
    assert torch.equal(found, expected)
    assert int(count) == 3


def test_the_planner_knows_which_logits_are_large() -> None:
    assert losses.large_numel(torch.device("cpu")) == operations.LARGE_LOGITS_OF_PROCESSORS
    assert losses.large_numel(torch.device("cuda")) == operations.LARGE_LOGITS
