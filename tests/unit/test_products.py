"""Both libraries give the same product, and the quicker one is taken only for what it takes and pays for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait import products
from plait.errors import PlanError
from plait.products import FEWEST_ROWS, FEWEST_SUMMED, Products, operations


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that oneDNN is given."""
    asked: list[tuple[int, ...]] = []
    onednn = products._onednn()

    def call(x: Tensor, *rest: Any) -> Tensor:
        asked.append(tuple(x.shape))
        found: Tensor = onednn(x, *rest)
        return found

    monkeypatch.setattr(products, "_onednn", lambda: None if onednn is None else call)
    return asked


@pytest.mark.skipif(not operations(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("shape", [(FEWEST_ROWS, 12), (2, FEWEST_ROWS // 2, 12), (1, FEWEST_SUMMED, 12)])
def test_both_libraries_agree(shape: tuple[int, ...], asked: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    x, weight, bias, grad = torch.randn(shape), torch.randn(7, 12), torch.randn(7), torch.randn(*shape[:-1], 7)
    made = Products()
    torch.testing.assert_close(made.linear(x, weight, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(made.linear(x, weight, None), F.linear(x, weight))
    torch.testing.assert_close(made.product(grad, weight), grad @ weight)
    torch.testing.assert_close(made.linear(x, weight.t().contiguous().t(), bias), F.linear(x, weight, bias))
    assert len(asked) == 4
    left, right = grad.reshape(-1, 7).t(), x.reshape(-1, 12)
    summed = made.summed(left, right)
    if right.shape[0] < FEWEST_SUMMED:
        assert summed is None
    else:
        torch.testing.assert_close(summed, left @ right)


@pytest.mark.parametrize("why", ["float64", "few rows", "torch"])
def test_otherwise_torch_multiplies(why: str, asked: list[tuple[int, ...]]) -> None:
    made = Products("torch" if why == "torch" else "rule")
    x = torch.randn(FEWEST_ROWS - (why == "few rows"), 5, dtype=torch.float64 if why == "float64" else torch.float32)
    weight = torch.randn(3, 5, dtype=x.dtype)
    assert torch.equal(made.linear(x, weight, None), F.linear(x, weight))
    assert torch.equal(made.product(x @ weight.t(), weight), x @ weight.t() @ weight)
    assert not asked


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(PlanError, match="linear_product 'mkl' is unknown; there are rule, torch"):
        Products("mkl")
