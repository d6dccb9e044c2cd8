"""Recomputation: keep less of the forward, and run it again inside backward.

`full` keeps only the input of each block (T. Chen et al., Training Deep Nets with Sublinear Memory
Cost, 2016). `selective` keeps the outputs of matrix products, and recomputes attention, norms and
activations, which are large and cheap (V. Korthikanti et al., Reducing Activation Recomputation in
Large Transformer Models, 2022, section 5).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from plait import products
from plait.engine.state.buffers import Again, Buffers, Context, First
from plait.errors import ModelError
from plait.values import PyTree

Contexts = Callable[[], tuple[Context, Context]]
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


def _keep_products(
    context: object, op: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def apply(model: nn.Module, blocks: Sequence[str], policy: str) -> None:
    """Let each block recompute by `policy`: none, selective or full."""
    if policy == "none":
        return
    if not blocks:
        raise ModelError(
            f"remat:{policy} recomputes block by block, and this model names none; pass "
            "blocks='layers.*'"
        )
    contexts: Contexts = _no_contexts
    if policy == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = _checkpointed(block.forward, contexts, Buffers(block))


def _no_contexts() -> tuple[Context, Context]:
    return nullcontext(), nullcontext()


def _checkpointed(
    forward: Callable[..., PyTree], contexts: Contexts, buffers: Buffers
) -> Callable[..., PyTree]:
    """A graph of torch.compile is told `contexts` alone: it makes the buffers' changes once."""

    def minding_buffers() -> tuple[Context, Context]:
        inner, inner_again = contexts()
        first = First(buffers, inner)
        return first, Again(buffers, first, inner_again)

    def recomputing(*args: PyTree, **kwargs: PyTree) -> PyTree:
        minds = bool(buffers) and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        context_fn = minding_buffers if minds else contexts
        return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    return recomputing
