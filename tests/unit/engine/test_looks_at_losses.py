"""The look at the first losses takes compiled losses, and targets of any layout."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from plait.engine.masked_means import MaskedMeanCheck
from plait.torch_internals import without_compiling
from tests.unit.engine.test_masked_means import said


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ["coo", "nested"])
def test_targets_of_another_layout_are_left_to_the_loss(kind: str) -> None:
    """The look at a rank's first targets ended in an error of torch."""
    dense = torch.ones(4, 5)
    wanted = dense.to_sparse() if kind == "coo" else torch.nested.nested_tensor(list(dense))

    def far(output: Tensor, wanted: Tensor) -> Tensor:
        whole = wanted.to_padded_tensor(0.0) if wanted.is_nested else wanted.to_dense()
        return F.mse_loss(output, whole)

    check = MaskedMeanCheck(far, 2)
    output = torch.zeros(4, 5, requires_grad=True)
    assert [check(output, wanted).item() for _ in range(2)] == [1.0, 1.0]


def test_a_compiled_loss_is_looked_at_as_it_was_written() -> None:
    """Its graph took in the functions that look at a loss, and ended in a TypeError."""

    def own(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    torch._dynamo.reset()
    compiled = CompileCounter()
    loss = torch.compile(own, backend=compiled)
    (text,) = said("mb2", loss, [1, 4, 2, 2])
    assert "1 to 4 targets that are not -100" in text
    assert compiled.frame_count == 1


def test_a_loss_that_compiles_first_inside_is_looked_at_as_it_was_written() -> None:
    """A process that had not loaded the compiler traced the looks, and ended in a TypeError."""
    script = """
import sys, torch
from plait.engine.masked_means import MaskedMeanCheck
def square(output, targets):
    return (output[:2] - targets[:2]).square().mean()
def loss(output, targets):
    return torch.compile(square, backend="eager")(output, targets)
check = MaskedMeanCheck(loss, 2)
assert "torch._dynamo" not in sys.modules
for _ in range(6):
    assert check(torch.zeros(4, 3, requires_grad=True), torch.ones(4, 3)) == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_threads_that_look_at_once_leave_the_compiler_as_it_was() -> None:
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with without_compiling():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    with without_compiling():
        leave.set()
        thread.join()
    torch._dynamo.reset()
    compiled = CompileCounter()
    torch.compile(torch.sin, backend=compiled)(torch.ones(2))
    assert compiled.frame_count == 1


def messages_of(losses: list[str]) -> list[str]:
    """The first words of what is said over calls of a mean, a sum or a contrastive loss."""
    calls = iter(losses)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        kind = next(calls)
        if kind == "apart":
            scaled = F.normalize(output, dim=1)
            return F.cross_entropy(scaled @ scaled.t(), torch.arange(len(output)))
        return F.mse_loss(output, targets, reduction=kind)

    check = MaskedMeanCheck(loss, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in losses:
            check(torch.randn(4, 5, requires_grad=True), torch.zeros(4, 5))
    return [str(one.message)[:30] for one in caught]


def test_a_loss_that_is_another_one_after_some_steps_is_looked_at() -> None:
    assert messages_of(["mean"] * 9) == []
    assert messages_of(["mean"] * 9 + ["apart"] * 2) == ["the loss compares samples of a"]
    assert messages_of((["mean"] * 5 + ["apart"]) * 2) == ["the loss compares samples of a"]
    assert messages_of(["sum"] * 9 + ["apart"] * 9) == ["the loss returns one number, w"]
