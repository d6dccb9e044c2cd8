"""Forwards that compare samples are found; those that leave samples alone are not suspected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import NotAvailable
from plait.parallel.tensor.mixed_samples import refuse_mixed_samples

LENGTH, WIDTH = 17, 8  # 17 positions are as many as the first number of samples that is tried


class Calls(nn.Module):
    """A layer, and some code behind it."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.layer(x))


def judge(code: Callable[[Tensor], Tensor]) -> None:
    model = Calls(code).to("meta")
    shape = (LENGTH, WIDTH)
    refuse_mixed_samples(model, lambda n: model(torch.zeros(n, *shape, device="meta")), "tp4:2d")


MIXING = {
    "mm": lambda x: x.mean(1) @ x.mean(1).T,
    "mean": lambda x: x - x.mean(0),
    "cumsum": lambda x: (x.flatten(0, 1) > 0).cumsum(0),
    "_softmax": lambda x: x.softmax(0),
}
ALONE = {
    "attention": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "positions": lambda x: x.mean(1),
    "batch norm": lambda x: F.batch_norm(x.mean(1), None, None, training=True),
    "a loss": lambda x: F.cross_entropy(x.flatten(0, 1), x.argmax(-1).flatten()),
    "values": lambda x: x * (1.0 if bool((x > 0).any()) else 2.0),
}


@pytest.mark.parametrize("operation", MIXING)
def test_code_that_compares_samples_is_refused_by_its_line(operation: str) -> None:
    with pytest.raises(NotAvailable, match=rf"test_mixed_samples.py:\d+.*\({operation}\).*tpN:1d"):
        judge(MIXING[operation])


def test_code_that_catches_exceptions_is_refused_too() -> None:
    def catching(x: Tensor) -> Tensor:
        try:
            return x.softmax(0)
        except Exception:
            return x

    with pytest.raises(NotAvailable, match=r"\(_softmax\).*tpN:1d"):
        judge(catching)


@pytest.mark.parametrize("what", ALONE)
def test_code_that_leaves_samples_alone_passes(what: str) -> None:
    judge(ALONE[what])


class Dropping(nn.Module):
    """Drops numbers of a batch, or of a table that all samples share."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + self.drop(self.code(x)).sum()


@pytest.mark.parametrize(
    ("code", "where"),
    [
        (lambda x: x.transpose(0, 1), "dim 1"),
        (lambda x: (x + torch.ones(WIDTH)).transpose(0, 1), "dim 1"),
        (lambda x: x.new_zeros(5, WIDTH), "without samples"),
    ],
)
def test_dropout_without_samples_in_the_first_dim_is_refused(
    code: Callable[[Tensor], Tensor], where: str
) -> None:
    model = Dropping(code)
    with pytest.raises(NotAvailable, match=rf"'drop' \(dropout\).* {where}, and tp4:2d.*tpN:1d"):
        refuse_mixed_samples(
            model, lambda n: model(torch.zeros(n, LENGTH, WIDTH, device="meta")), "tp4:2d"
        )


@pytest.mark.parametrize("code", [lambda x: x, lambda x: x.flatten(0, 1)])
def test_dropout_of_samples_in_the_first_dim_passes(code: Callable[[Tensor], Tensor]) -> None:
    model = Dropping(code)
    refuse_mixed_samples(
        model, lambda n: model(torch.zeros(n, LENGTH, WIDTH, device="meta")), "tp4:2d"
    )
    assert not model.drop._forward_pre_hooks
