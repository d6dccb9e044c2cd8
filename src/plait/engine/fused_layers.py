"""Encoder layers of torch that compute without their own modules in evaluation.

There `nn.TransformerEncoderLayer` calls one fused operation. It attends to the positions that it
gets, and a rank of `cp` has a part of them. With a padding mask `nn.TransformerEncoder` hands its
layers nested tensors. These have no shape by which they could be cut, or sent.
"""

from __future__ import annotations

from torch import nn

from plait.plan import Plan


def compute_by_modules(model: nn.Module, plan: Plan) -> None:
    """Have these layers evaluate as they train, under a plan that cuts models or sequences.

    Both marks are torch's own, and are read for the fused operation alone.
    """
    if plan.cp.size == plan.tp.size == plan.pp.size == 1:
        return
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
