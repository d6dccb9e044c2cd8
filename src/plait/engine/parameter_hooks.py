"""A warning where a parameter has a hook of its caller, whose gradient is a sum over samples."""

from __future__ import annotations

import warnings

from torch import nn

from plait.torch_internals import foreign_hooks


def warn_of_parameter_hooks(model: nn.Module) -> None:
    """Tell once which parameter has a hook, as `clamp` of a sum is not that of a mean.

    The engine adds gradients up over samples, micro-batches and ranks. It divides by the number of
    samples in the update, when all of them are known.
    """
    hooked = [name for name, param in model.named_parameters() if foreign_hooks(param)]
    if hooked:
        warnings.warn(
            f"the hook of the parameter '{hooked[0]}' gets the gradient summed over the samples of "
            "one micro-batch of one rank, before the mean is taken; a hook that is not linear, "
            "such as a clamp, trains otherwise than on the mean: clip with max_norm instead, or in "
            "the optimizer",
            stacklevel=3,
        )
