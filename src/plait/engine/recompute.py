"""Recomputation: keep less of the forward, and run it again inside backward.

`full` keeps only the input of each block (T. Chen et al., Training Deep Nets with Sublinear Memory
Cost, 2016). `selective` keeps the outputs of matrix products, and recomputes attention, norms and
activations, which are large and cheap (V. Korthikanti et al., Reducing Activation Recomputation in
Large Transformer Models, 2022, section 5). Under `remat:auto` each block has a word of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from plait import products
from plait.engine.state.attributes import Attributes
from plait.engine.state.repeats import Context, FirstForward, Remembered, RepeatedForward
from plait.engine.state.written_tensors import WrittenTensors, kept_by
from plait.errors import ModelError, PlanError, nearest
from plait.forwards import give_forward
from plait.held import TableEntries, held_tensors, tables_of
from plait.parallel.tensor import TensorSplit
from plait.plan import Plan
from plait.plan.axes import REMATS, BlockRemat
from plait.random_state import Draws
from plait.torch_internals import (
    forget_written,
    has_hooks_that_always_run,
    places_written,
    stop_past_exceptions,
    storage_key,
)
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


class _KeptProducts:
    """The policy of one block: it keeps the outputs of products, and notes what is written into.

    A product without a bias ends in a view that counts versions of its own. So do the parts of one
    in a recurrent layer. A write into such a view leaves no trace in the product.
    """

    def __init__(self) -> None:
        self.written: set[int] = set()

    def __call__(
        self, context: SelectiveCheckpointContext, op: object, *args: PyTree, **kwargs: PyTree
    ) -> CheckpointPolicy:
        policy = _keep_products(context, op)
        if policy is CheckpointPolicy.MUST_SAVE:  # its memory may have been another tensor's
            self.written.difference_update(map(storage_key, held_tensors(context.op_output)))
        else:
            self.written.update(places_written(op, args, kwargs))
        return policy


class _WithoutWritten:
    """Around a second run within `again`: what was written into is computed again."""

    def __init__(self, again: Context, written: set[int]) -> None:
        self._again = again
        self._written = written

    def __enter__(self) -> None:
        forget_written(self._again, self._written)
        self._again.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._again.__exit__(*error)


def _selecting() -> tuple[Context, Context]:
    policy = _KeptProducts()
    first, again = create_selective_checkpoint_contexts(policy)
    return first, _WithoutWritten(again, policy.written)


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
    contexts: Contexts = _selecting if policy == "selective" else _no_contexts
    in_graphs: Contexts = _no_contexts
    if policy == "selective":
        in_graphs = _in_a_graph
    for name in blocks:
        block = model.get_submodule(name)
        give_forward(block, _checkpointed(name, block, (contexts, in_graphs), layers))


def _in_a_graph() -> tuple[Context, Context]:
    """The contexts of a block in a graph of torch.compile, or behind a break in one."""
    if not torch.compiler.is_compiling():
        return _selecting()
    found: tuple[Context, Context] = create_selective_checkpoint_contexts(_keep_products)
    return found


def _no_contexts() -> tuple[Context, Context]:
    return nullcontext(), nullcontext()


def _checkpointed(
    name: str, block: nn.Module, around: tuple[Contexts, Contexts], layers: TensorSplit | None
) -> Callable[..., PyTree]:
    """`around` are the contexts of a run, and of one in a graph of torch.compile.

    A graph makes changes of state once: they need no memory there.
    """
    contexts, in_graphs = around
    forward, attributes, written = block.forward, Attributes(block), WrittenTensors()
    checkpointed = functools.partial(
        checkpoint,
        forward,
        use_reentrant=False,
        early_stop=not has_hooks_that_always_run(block),  # an early stop would pass them by
    )

    def repeating(args: tuple[PyTree, ...], named: dict[str, PyTree]) -> tuple[Context, Context]:
        inner, inner_again = contexts()
        beside = [one for one in args if not isinstance(one, Tensor)]
        held = enumerate(held_tensors([*beside, *named.values()]))
        parts: list[AbstractContextManager[Remembered]] = [
            nullcontext(Draws.of(block)),
            nullcontext(TableEntries(tables_of([*args, *named.values()]))),
            attributes.watched(),
            written.watched({**kept_by(block), **dict(held)}),
        ]
        if layers is not None:
            parts.append(nullcontext(layers.layout()))
        first = FirstForward(inner, parts)
        return first, RepeatedForward(inner_again, first)

    def recomputing(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            try:  # no graph ends inside of it: where one would, all of this runs outside of graphs
                return checkpointed(*args, context_fn=in_graphs, **kwargs)
            finally:
                pass
        tensors = [one for one in args if isinstance(one, Tensor) and not one.is_inference()]
        versions = [one._version for one in tensors]
        result = checkpointed(*args, context_fn=lambda: repeating(args, kwargs), **kwargs)
        if any(one.requires_grad for one in held_tensors(result)):
            for tensor, version in zip(tensors, versions, strict=True):
                _check_unwritten(name, tensor, version)
        return result

    return recomputing


def _check_unwritten(name: str, tensor: Tensor, version: int) -> None:
    """Raises `ModelError` where a block has written into an argument [...] of this version."""
    if tensor._version != version:
        raise ModelError(
            f"block {name!r} writes into its argument, a tensor {list(tensor.shape)}, in place, "
            "and remat would run the block again on what it left there; write x = x + y where it "
            "has x += y, or take remat out of the plan"
        )
