"""Products of linear layers, by the quicker of the two libraries that torch brings for CPUs.

torch multiplies float32 matrices with MKL; oneDNN is its other library. Which of them is quicker
depends on the processor and on the size, so a measured table decides (`plait.cluster.products`).
oneDNN also compiles a kernel for each shape that it meets, and keeps up to 1,024 of them. Each
takes half a megabyte, so shapes that never come again are better not given to it
(`models/gated.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.cluster.products import (
    FIXED,
    FORWARD,
    INPUT_GRAD,
    MULTIPLICATIONS,
    ROWS,
    WEIGHT_GRAD,
    ProductTable,
)
from plait.errors import PlanError
from plait.paths import Paths
from plait.torch_internals import onednn_linear

MEASURED = "measured"
FEWEST_ROWS = ROWS[0]
FEWEST_MULTIPLICATIONS = MULTIPLICATIONS[0]
FEWEST_SUMMED = 128


def fixed_table(name: str) -> ProductTable:
    """The table of a choice that needs no measurement. Raises `PlanError` for another word."""
    if name not in FIXED:
        known = ", ".join((MEASURED, *FIXED))
        raise PlanError(f"linear_product '{name}' is unknown; there are {known}")
    return FIXED[name]


class Products:
    """Products by a table: each class by oneDNN or as torch itself would.

    `table`: a measured one, or the name of a fixed one (`rule`: oneDNN for float32 on a CPU, from
    `FEWEST_ROWS` and `FEWEST_MULTIPLICATIONS` on; `torch`: never). Only torch's own products have
    derivatives: where autograd records, as for a gradient's gradient, it multiplies.
    """

    def __init__(self, table: ProductTable | str = "rule", paths: Paths | None = None) -> None:
        self.table = fixed_table(table) if isinstance(table, str) else table
        self.paths = paths or Paths()

    def supports(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there is anything to choose for such tensors."""
        has_both = dtype == torch.float32 and device.type == "cpu" and _onednn() is not None
        if has_both and not self.table.onednn:
            self.paths.note("product_multiplications", False)
        return has_both and bool(self.table.onednn)

    def is_faster(self, x: Tensor, num_outputs: int, kind: str | None = None) -> bool:
        """Whether oneDNN is the quicker for x [..., K] times [K, num_outputs] in a product of this
        kind. Without a kind, for any product of a layer with that forward.

        Lower limits of a proof's `paths` count as if what is at hand were larger by as much.
        """
        numel = x.numel()
        if not (numel and self.supports(x.dtype, x.device)):
            return False
        rows = _scaled(
            numel // x.shape[-1], self.paths.limit("product_rows", FEWEST_ROWS), FEWEST_ROWS
        )
        fewest = self.paths.limit("product_multiplications", FEWEST_MULTIPLICATIONS)
        kinds = self.table.kinds(rows, _scaled(numel * num_outputs, fewest, FEWEST_MULTIPLICATIONS))
        is_faster = bool(kinds) if kind is None else kind in kinds
        self.paths.note("product_multiplications", is_faster)
        return is_faster

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K] times the transpose of weight [N, K], plus bias [N]: [..., N]."""
        if self.is_faster(x, weight.shape[0], FORWARD) and not _recorded(x, weight):
            return _by_onednn(x, weight, bias)
        return F.linear(x, weight, bias)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., N] times weight [N, K]: [..., K]."""
        is_faster = self.is_faster(x, weight.shape[1], INPUT_GRAD) and not _recorded(x, weight)
        return _by_onednn(x, weight.t()) if is_faster else x @ weight

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        """left [N, rows] times right [rows, K], [N, K]: a sum over the rows, as a new tensor."""
        is_faster = self.is_faster(right, left.shape[0], WEIGHT_GRAD) and not _recorded(left, right)
        return _by_onednn(left, right.t()) if is_faster else left @ right

    def summed(self, left: Tensor, right: Tensor) -> Tensor | None:
        """The product [N, K] of `weight_grad`, to be added elsewhere; None where adding it in place
        is as quick, which oneDNN cannot do.

        Below `FEWEST_SUMMED` rows the sum is as large as the weight, so that it is as quick.
        """
        fewest = self.paths.limit("product_summed", FEWEST_SUMMED)
        if right.shape[0] < fewest or not self.is_faster(right, left.shape[0], WEIGHT_GRAD):
            return None
        return _by_onednn(left, right.t())

    def into(self, out: Tensor, x: Tensor, weight: Tensor, *, add: bool = False) -> None:
        """Write, or add, x [rows, K] times the transpose of weight [N, K] to `out` [rows, N].
        Records nothing.
        """
        sums_enough = x.shape[1] >= self.paths.limit("product_summed", FEWEST_SUMMED)
        if not (sums_enough and self.is_faster(x, weight.shape[0], FORWARD)):
            torch.addmm(out, x, weight.t(), beta=int(add), out=out)
        elif add:
            out.add_(_by_onednn(x, weight))
        else:
            out.copy_(_by_onednn(x, weight))


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = _onednn()(x, weight, bias, "none", [], "")
    return found


def _scaled(amount: int, limit: int, default: int) -> int:
    return amount * default // max(1, limit)


def _recorded(x: Tensor, weight: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)


@functools.cache
def _onednn() -> Any:
    return onednn_linear()


def operations() -> frozenset[Any]:
    """The operations of torch's dispatcher that a product may be, beside torch's own."""
    found = _onednn()
    return frozenset() if found is None else frozenset({found.default})
