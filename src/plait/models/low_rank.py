"""The matrices of low-rank adapters on packed experts: W_e + s B_e A_e for every expert e.

Source: Hu et al., "LoRA" (2021), section 4.1, for each expert by itself. As in PEFT
(`target_parameters`), one matrix holds those of all E experts. A [E r, in] has one expert behind
the other, and B [out, r E] has the experts innermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.grouped import grouped_product, kernel_takes


@dataclass(frozen=True)
class LowRank:
    """The adapters of experts, apart: a [E, r, in], b [E, out, r], and the factor of b a."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix [E, out, in] of each expert that computes here, and its adapters if it has any."""

    weight: Tensor
    low_rank: LowRank | None = None


def apart(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A [E r, in] -> [E, r, in], and B [out, r E] -> [E, out, r]; views of the same memory."""
    return a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)


def total(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool) -> Tensor:
    """The weights of experts that compute by themselves what they did with their adapters.

    `weight` and the result are [E, out, in], or [E, in, out] where `transposed`; a [E, r, in],
    b [E, out, r]. Differentiable.
    """
    left, right = (a.mT, b.mT) if transposed else (b, a)
    return torch.baddbmm(weight, left, right, alpha=scale)


def low_rank_of(module: Any, key: str) -> LowRank | None:
    """The adapters of a module's parameter `key` [E, out, in]; None where it has none."""
    table: nn.ModuleDict | None = module._modules.get("lora_A")
    if table is None or key not in table:
        return None
    first: Any = table[key]
    a, b = apart(first.weight, module.lora_B[key].weight, module.adapter.rank)
    return LowRank(a, b, module.adapter.scale)


def product(rows: Tensor, matrix: ExpertMatrix, counts: Sequence[int], method: str) -> Tensor:
    """rows [R, in] sorted by expert, `counts` of each -> [R, out], with the adapters' share.

    The share is made by two narrow products, so that no weight is added up.
    """
    output = grouped_product(rows, matrix.weight, counts, method)
    low_rank = matrix.low_rank
    if low_rank is None:
        return output
    narrow = rows
    for weight in (low_rank.a, low_rank.b):
        fits = method != "kernel" or kernel_takes(weight)
        own = weight.contiguous()
        narrow = grouped_product(narrow, own, counts, method if fits else "loop")
    return output + narrow * low_rank.scale
