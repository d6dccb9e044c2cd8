"""A warning where a model in float64 would be trained in fewer digits without a word."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from plait.plan import Plan


def warn_of_lost_digits(model: nn.Module, plan: Plan | str) -> None:
    """Tell once that all parameters are in float64, and the plan computes in float32.

    A plan without a word of precision computes in float32, whatever the model is in.
    """
    is_said = "precision:" in plan if isinstance(plan, str) else plan.precision != "float32"
    if is_said:
        return
    kinds = {param.dtype for param in model.parameters() if param.is_floating_point()}
    if kinds == {torch.float64}:
        warnings.warn(
            f"the parameters are in float64, and '{plan}' computes in float32: add "
            "precision:float64 to the plan to keep all digits, or make the model float32",
            stacklevel=3,
        )
