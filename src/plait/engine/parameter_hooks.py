"""A warning where a parameter has a hook of its caller, and a plan divides the batch."""

from __future__ import annotations

import warnings

from torch import nn

from plait.plan import Plan
from plait.torch_internals import foreign_hooks


def warn_of_parameter_hooks(model: nn.Module, plan: Plan) -> None:
    """Tell once which parameter has a hook, as the clamps of parts are not that of their sum.

    Each micro-batch of each rank has its own share of the gradient of the mean loss. The engine
    adds these up after the hooks.
    """
    num_parts = plan.dp.size * plan.cp.size * plan.micro_batches
    hooked = [name for name, param in model.named_parameters() if foreign_hooks(param)]
    if hooked and num_parts > 1:
        warnings.warn(
            f"the hook of the parameter '{hooked[0]}' gets the gradient of each of {num_parts} "
            "micro-batches by itself, and these are added afterwards; a hook that is not linear, "
            "such as a clamp, trains otherwise than on their sum: clip with max_norm instead, or "
            "in the optimizer",
            stacklevel=3,
        )
