"""A base in 8 or 4 bits, as the library that makes the codes reads them: one weight after another.

Nothing of the engine's cuts, bytes or buffers is used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.adapters import coded_weights
from plait.models.coded import library

BLOCK = 64


@torch.no_grad()
def round_base(model: nn.Module) -> nn.Module:
    """Round the frozen weights of a model that its `[adapter]` wants in codes; returns it."""
    for name, base in coded_weights(model).items():
        weight = model.get_parameter(name)
        weight.data = _rounded(weight.data, base)
    return model


def _rounded(weight: Tensor, base: str) -> Tensor:
    """The numbers of the codes of a weight [rows, columns], each row in blocks of its own."""
    functions: Any = library()
    columns = weight.shape[1]
    rows = F.pad(weight.float(), (0, -columns % BLOCK)).contiguous()
    if base == "nf4":
        codes = functions.quantize_4bit(rows, blocksize=BLOCK, quant_type=base)
        numbers = functions.dequantize_4bit(*codes)
    else:
        codes = functions.quantize_blockwise(rows, blocksize=BLOCK)
        numbers = functions.dequantize_blockwise(*codes)
    rounded: Tensor = numbers[:, :columns].to(weight)
    return rounded
