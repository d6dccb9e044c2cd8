"""A warning where a model in float64 would be trained in fewer digits without a word."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from plait.plan import Plan


def warn_of_lost_digits(model: nn.Module, plan: Plan) -> None:
    """Tell once that the parameters are in float64, and the plan computes in float32.

    A plan without a word of precision computes in float32, whatever the model is in.
    """
    if plan.precision != "float32":
        return  # float64, or fewer digits by the plan's own word
    for name, param in model.named_parameters():
        if param.dtype == torch.float64:
            warnings.warn(
                f"the parameter '{name}' is in float64, and '{plan}' computes in float32: add "
                "precision:float64 to the plan to keep all digits, or make the model float32",
                stacklevel=3,
            )
            return
