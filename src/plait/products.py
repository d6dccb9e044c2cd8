"""The product of a linear layer, by the quicker of the two libraries that torch brings for CPUs.

torch multiplies float32 matrices with MKL, which leaves the widest vectors of processors that are not Intel's unused; oneDNN
does not. Products of a few rows read the weight and do little with it: there memory sets the pace, and MKL stays.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.errors import PlanError

RULES = ("rule", "torch")
FEWEST_ROWS = 32
FEWEST_SUMMED = 128


class Products:
    """`rule`: oneDNN for float32 on a CPU, from `FEWEST_ROWS` rows on. `torch`: what torch itself would take.

    A weight's gradient sums over the rows, into a matrix as large as the weight: oneDNN cannot add to it in place, which pays
    from `FEWEST_SUMMED` rows on.
    """

    def __init__(self, rule: str = "rule") -> None:
        if rule not in RULES:
            raise PlanError(f"linear_product '{rule}' is unknown; there are {', '.join(RULES)}")
        self._by_rule = rule == "rule"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (.., K) times the transpose of weight (N, K), plus bias (N,)."""
        if self._is_quicker(x):
            found: Tensor = _onednn()(x, weight, bias, "none", [], "")
            return found
        return F.linear(x, weight, bias)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (.., N) times weight (N, K)."""
        return self.linear(x, weight.t(), None) if self._is_quicker(x) else x @ weight

    def summed(self, left: Tensor, right: Tensor) -> Tensor | None:
        """left (N, rows) times right (rows, K) as a new tensor; None where adding the product in place is as quick."""
        if right.shape[0] < FEWEST_SUMMED or not self._is_quicker(right):
            return None
        found: Tensor = _onednn()(left, right.t(), None, "none", [], "")
        return found

    def _is_quicker(self, x: Tensor) -> bool:
        return (
            self._by_rule
            and _onednn() is not None
            and x.dtype == torch.float32
            and x.device.type == "cpu"
            and x.numel() >= FEWEST_ROWS * x.shape[-1]
        )


@functools.cache
def _onednn() -> Any:
    """torch's door to oneDNN's product, the one that compiled models use; None where torch was built without."""
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def operations() -> frozenset[Any]:
    """The operations of torch's dispatcher that a product may be, beside torch's own."""
    found = _onednn()
    return frozenset() if found is None else frozenset({found.default})
