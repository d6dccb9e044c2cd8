"""The product of a linear layer, by the quicker of the two libraries that torch brings for CPUs.

torch multiplies float32 matrices with MKL, which leaves the widest vectors of processors that are
not Intel's unused; oneDNN does not. It takes longer to begin, so a small product stays with MKL;
and so does one of a few rows, which reads the weight and does little with it: there memory sets the
pace. It also compiles a kernel for each shape that it meets, and keeps up to 1,024 of them, half a
megabyte each: shapes that never come again are better not given to it (`models/gated.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.errors import PlanError
from plait.paths import Paths

RULES = ("rule", "torch")
FEWEST_ROWS = 16
FEWEST_MULTIPLICATIONS = 1 << 21
FEWEST_SUMMED = 128


class Products:
    """`rule`: oneDNN for float32 on a CPU, from `FEWEST_ROWS` and `FEWEST_MULTIPLICATIONS` on.
    `torch`: as torch itself would.

    Only torch's own products have derivatives: where autograd records, as for a gradient's
    gradient, it multiplies.
    """

    def __init__(self, rule: str = "rule", paths: Paths | None = None) -> None:
        if rule not in RULES:
            raise PlanError(f"linear_product '{rule}' is unknown; there are {', '.join(RULES)}")
        self._by_rule = rule == "rule"
        self.paths = paths or Paths()

    def serves(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there is anything to choose for such tensors."""
        return (
            self._by_rule
            and dtype == torch.float32
            and device.type == "cpu"
            and _onednn() is not None
        )

    def gains(self, x: Tensor, num_outputs: int) -> bool:
        """Whether oneDNN is the quicker for x (.., K) times (K, num_outputs)."""
        if not self.serves(x.dtype, x.device):
            return False
        limit = self.paths.limit
        numel = x.numel()
        gains = (
            numel * num_outputs >= limit("product_multiplications", FEWEST_MULTIPLICATIONS)
            and numel >= limit("product_rows", FEWEST_ROWS) * (x.shape[-1])
        )
        self.paths.note("product_multiplications", gains)
        return gains

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (.., K) times the transpose of weight (N, K), plus bias (N,)."""
        if self.gains(x, weight.shape[0]) and not _recorded(x, weight):
            return _by_onednn(x, weight, bias)
        return F.linear(x, weight, bias)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (.., N) times weight (N, K)."""
        gains = self.gains(x, weight.shape[1]) and not _recorded(x, weight)
        return _by_onednn(x, weight.t()) if gains else x @ weight

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        """left (N, rows) times right (rows, K): a sum over the rows, as a new tensor."""
        gains = self.gains(right, left.shape[0]) and not _recorded(left, right)
        return _by_onednn(left, right.t()) if gains else left @ right

    def summed(self, left: Tensor, right: Tensor) -> Tensor | None:
        """The same, to be added elsewhere; None where adding the product in place is as quick,
        which oneDNN cannot do.

        It is as quick below `FEWEST_SUMMED` rows, as the sum is as large as the weight.
        """
        fewest = self.paths.limit("product_summed", FEWEST_SUMMED)
        if right.shape[0] < fewest or not self.gains(right, left.shape[0]):
            return None
        return _by_onednn(left, right.t())

    def into(self, out: Tensor, x: Tensor, weight: Tensor, *, add: bool = False) -> None:
        """Write, or add, x (rows, K) times the transpose of weight (N, K) to `out` (rows, N).
        Records nothing.
        """
        fewest = self.paths.limit("product_rows", FEWEST_ROWS)
        made = self.summed(x, weight.t()) if x.shape[0] >= fewest else None
        if made is None:
            torch.addmm(out, x, weight.t(), beta=int(add), out=out)
        else:
            out.add_(made) if add else out.copy_(made)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = _onednn()(x, weight, bias, "none", [], "")
    return found


def _recorded(x: Tensor, weight: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)


@functools.cache
def _onednn() -> Any:
    """torch's door to oneDNN's product, the one that compiled models use; None where torch was
    built without.
    """
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def operations() -> frozenset[Any]:
    """The operations of torch's dispatcher that a product may be, beside torch's own."""
    found = _onednn()
    return frozenset() if found is None else frozenset({found.default})
