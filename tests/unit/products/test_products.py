"""Both libraries give the same product, and the quicker one is taken only for what it takes and
pays for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait import products
from plait.errors import PlanError
from plait.products import FEWEST_MULTIPLICATIONS, FEWEST_ROWS, FEWEST_SUMMED, Products, operations

N = 256
K = FEWEST_MULTIPLICATIONS // FEWEST_ROWS // 256
"""Of a weight with which `FEWEST_ROWS` rows are just enough work."""


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


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(
        one, other, rtol=1e-4, atol=1e-3
    )  # sums of hundreds, in another order


@pytest.mark.skipif(not operations(), reason="torch was built without oneDNN")
@pytest.mark.parametrize(
    "shape", [(FEWEST_ROWS, K), (2, FEWEST_ROWS // 2, K), (1, FEWEST_SUMMED, K)]
)
def test_both_libraries_agree(shape: tuple[int, ...], asked: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    weight = torch.randn(N, K)
    bias = torch.randn(N)
    grad = torch.randn(*shape[:-1], N)
    made = Products()
    close(made.linear(x, weight, bias), F.linear(x, weight, bias))
    close(made.linear(x, weight, None), F.linear(x, weight))
    close(made.product(grad, weight), grad @ weight)
    close(made.linear(x, weight.t().contiguous().t(), bias), F.linear(x, weight, bias))
    left = grad.reshape(-1, N).t()
    right = x.reshape(-1, K)
    close(made.weight_grad(left, right), left @ right)
    assert len(asked) == 5
    summed = made.summed(left, right)
    if right.shape[0] < FEWEST_SUMMED:
        assert summed is None
    else:
        assert summed is not None
        close(summed, left @ right)


@pytest.mark.skipif(not operations(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("rows", [FEWEST_ROWS - 1, FEWEST_ROWS])
def test_a_product_is_written_or_added_where_it_belongs(
    rows: int, add: bool, asked: list[tuple[int, ...]]
) -> None:
    x = torch.randn(rows, K)
    weight = torch.randn(N, K)
    there = torch.randn(rows, N)
    expected = F.linear(x, weight) + (there if add else 0)
    if not add:
        there.fill_(torch.nan)
    Products().into(there, x, weight, add=add)
    close(there, expected)
    assert len(asked) == (rows >= FEWEST_ROWS)


@pytest.mark.parametrize("why", ["float64", "few rows", "little work", "torch"])
def test_otherwise_torch_multiplies(why: str, asked: list[tuple[int, ...]]) -> None:
    made = Products("torch" if why == "torch" else "rule")
    x = torch.randn(
        FEWEST_ROWS - (why == "few rows"),
        K,
        dtype=torch.float64 if why == "float64" else torch.float32,
    )
    weight = torch.randn(N - 1 if why == "little work" else 2 * N, K, dtype=x.dtype)
    assert torch.equal(made.linear(x, weight, None), F.linear(x, weight))
    assert torch.equal(made.product(x @ weight.t(), weight), x @ weight.t() @ weight)
    if why != "few rows":  # the gradient of a weight is large, however many rows it sums over
        assert made.summed(weight, x.t()) is None
    assert not asked


def test_where_torch_records_its_own_product_stays(asked: list[tuple[int, ...]]) -> None:
    x = torch.randn(FEWEST_ROWS, K)
    weight = torch.randn(N, K, requires_grad=True)
    assert Products().linear(x, weight, None).requires_grad and not asked
    with torch.no_grad():
        Products().linear(x, weight, None)
    assert len(asked) == (products._onednn() is not None)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(
        PlanError, match="linear_product 'mkl' is unknown; there are measured, rule, torch"
    ):
        Products("mkl")


@pytest.mark.skipif(not operations(), reason="torch was built without oneDNN")
def test_a_run_that_leaves_all_to_torch_says_so() -> None:
    made = Products("torch")
    assert not made.supports(torch.float64, torch.device("cpu"))
    assert made.paths.taken() == {}
    assert not made.supports(torch.float32, torch.device("cpu"))
    assert made.paths.taken() == {"product_multiplications": (False,)}
