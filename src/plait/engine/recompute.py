"""Recomputation: keep less of the forward, and run it again inside backward.

`full` keeps only the input of each block (T. Chen et al., Training Deep Nets with Sublinear Memory
Cost, 2016). `selective` keeps the outputs of matrix products, and recomputes attention, norms and
activations, which are large and cheap (V. Korthikanti et al., Reducing Activation Recomputation in
Large Transformer Models, 2022, section 5). Under `remat:auto` each block has a word of its own.
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
from plait.engine.state.counters import FirstCounts, RepeatedCounts
from plait.engine.state.given import AsGiven
from plait.errors import ModelError, PlanError, nearest
from plait.forwards import give_forward
from plait.parallel.tensor import TensorSplit
from plait.plan import Plan
from plait.plan.axes import REMATS, BlockRemat
from plait.random_state import FirstDraws, RepeatedDraws
from plait.torch_internals import has_hooks_that_always_run, stop_past_exceptions
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


def words_of(
    plan: Plan, blocks: Sequence[str], chosen: Sequence[BlockRemat] | None
) -> list[BlockRemat]:
    """The recomputation of each block; under `remat:auto` it is `chosen`.

    Errors: `ModelError` for a model without blocks, and `PlanError` for other numbers of words.
    """
    if plan.remat == "none":
        return ["none"] * len(blocks)
    if not blocks:
        raise ModelError(
            f"remat:{plan.remat} recomputes block by block, and this model names none; pass "
            "blocks='layers.*'"
        )
    if plan.remat != "auto":
        return [plan.remat] * len(blocks)
    check_chosen(plan, chosen)
    words = list(chosen or ())
    if len(words) != len(blocks):
        raise PlanError(
            f"plan '{plan}': the choice has {len(words)} words and the model {len(blocks)} blocks "
            f"({blocks[0]} to {blocks[-1]}); give one word for each block"
        )
    return words


def check_chosen(plan: Plan, chosen: Sequence[BlockRemat] | None) -> None:
    """Raises `PlanError` for `remat:auto` without the words of the blocks, or with other words."""
    if plan.remat != "auto":
        return
    if not chosen:
        raise PlanError(
            f"plan '{plan}': remat:auto is chosen by the planner for a model and a cluster; pass "
            "Options(remat=plait.estimate(config, plan, cluster).remat), or write remat:full"
        )
    wrong = next((word for word in chosen if word not in REMATS), None)
    if wrong is not None:
        raise PlanError(
            f"the choice of blocks has the word {wrong!r}; {nearest(str(wrong), REMATS)}"
        )


def apply(
    model: nn.Module, blocks: Sequence[str], policy: str, layers: TensorSplit | None = None
) -> None:
    """Let each block recompute by `policy`: none, selective or full.

    `layers` are those of the model that a tensor axis has split.
    """
    if policy == "none":
        return
    stop_past_exceptions()
    contexts: Contexts = _no_contexts
    if policy == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    for name in blocks:
        block = model.get_submodule(name)
        give_forward(block, _checkpointed(block, contexts, layers))


def _no_contexts() -> tuple[Context, Context]:
    return nullcontext(), nullcontext()


def _checkpointed(
    block: nn.Module, contexts: Contexts, layers: TensorSplit | None
) -> Callable[..., PyTree]:
    """A graph of torch.compile gets `contexts` alone: it makes the buffers' changes once."""
    forward, buffers = block.forward, Buffers(block)
    checkpointed = functools.partial(
        checkpoint,
        forward,
        use_reentrant=False,
        early_stop=not has_hooks_that_always_run(block),  # an early stop would pass them by
    )

    def repeating(*given: PyTree) -> tuple[Context, Context]:
        inner, inner_again = contexts()
        if layers is not None:
            inner_again = layers.repeated(inner_again)
        if buffers:
            first = First(buffers, inner)
            inner, inner_again = first, Again(buffers, first, inner_again)
        counts = FirstCounts(inner, block)
        draws = FirstDraws(counts, block)
        again = RepeatedDraws(draws, RepeatedCounts(counts, inner_again))
        return draws, AsGiven(given, again)

    def recomputing(*args: PyTree, **kwargs: PyTree) -> PyTree:
        is_eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        context_fn = functools.partial(repeating, *args, *kwargs.values()) if is_eager else contexts
        return checkpointed(*args, context_fn=context_fn, **kwargs)

    return recomputing
