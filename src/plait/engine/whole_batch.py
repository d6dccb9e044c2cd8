"""Lookup tables whose options need the whole batch at once, which a plan may divide.

`max_norm` shortens the rows that a batch looks up, inside the forward. Ranks with other samples
shorten other rows, and their copies drift apart. `scale_grad_by_freq` divides gradients by counts
over the batch of one forward.
"""

from __future__ import annotations

from torch import nn

from plait.errors import ModelError
from plait.plan import Plan

OPTIONS = ("max_norm", "scale_grad_by_freq")


def refuse_whole_batch(model: nn.Module, plan: Plan) -> None:
    """Raise `ModelError` for an `nn.Embedding` with an option that the plan would change."""
    ranks = plan.dp.size * plan.cp.size
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        options = [key for key in OPTIONS if getattr(module, key)]
        if options and plan.tp.size > 1 and plan.tp.mode != "1d":
            raise ModelError(
                f"'{name}' has {options[0]}, which looks at the whole batch, and {plan.tp} gives "
                f"ranks other samples; leave {options[0]} out, or use tpN:1d"
            )
        if module.max_norm is not None and ranks > 1:
            raise ModelError(
                f"'{name}' has max_norm = {module.max_norm:g}, which each of the {ranks} ranks of "
                f"'{plan}' would apply to the rows of its own samples; leave max_norm or dp and cp "
                "out"
            )
        if module.scale_grad_by_freq and ranks * plan.micro_batches > 1:
            raise ModelError(
                f"'{name}' has scale_grad_by_freq, which counts over the whole batch, and "
                f"'{plan}' computes it in {ranks * plan.micro_batches} parts; leave "
                "scale_grad_by_freq out, or dp, cp and mb"
            )
