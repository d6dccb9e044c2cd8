"""Recomputation: keep less of the forward, and run it again inside backward.

`full` keeps only the input of each block (T. Chen et al., Training Deep Nets with Sublinear Memory
Cost, 2016). `selective` keeps the outputs of matrix products, and recomputes attention, norms and
activations, which are large and cheap (V. Korthikanti et al., Reducing Activation Recomputation in
Large Transformer Models, 2022, section 5).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from plait import products
from plait.errors import ModelError

_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
        *products.operations(),
    }
)


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def apply(model: nn.Module, blocks: Sequence[str], policy: str) -> None:
    """Let each block recompute by `policy`: none, selective or full."""
    if policy == "none":
        return
    if not blocks:
        raise ModelError(
            f"remat:{policy} recomputes block by block, and this model names none; pass blocks='layers.*'"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if policy == "selective":
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _keep_products
        )
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputing
