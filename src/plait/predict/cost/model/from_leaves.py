"""The description of a module that does not run on the meta device: what its layers say of
themselves.

Only weights and matrix products of Linear, Embedding and Conv layers are seen, so time is a lower
bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.predict.cost.model.operations import (
    Block,
    Elementwise,
    Lookup,
    Matmul,
    Model,
    Operation,
    Saved,
)
from plait.values import PyTree

if TYPE_CHECKING:
    from torch import nn


def describe_by_leaves(module: nn.Module, seq_len: int) -> Model:
    """The description from the layers of a module; children of its largest list are its blocks."""
    lists = [
        child
        for _, child in module.named_modules()
        if type(child).__name__ in {"ModuleList", "Sequential"} and len(child) > 1
    ]
    repeated = max(
        lists, key=lambda child: sum(p.numel() for p in child.parameters()), default=None
    )
    blocks = list(repeated) if repeated is not None else []
    inside = {id(child) for block in blocks for child in block.modules()}
    outer = [leaf for leaf in _leaves(module) if id(leaf) not in inside]
    before = [child for child in outer if type(child).__name__ == "Embedding"]
    after = [child for child in outer if type(child).__name__ != "Embedding"]
    described = [describe_leaves("embedding", before)] if before else []
    described += [describe_leaves("block", _leaves(block)) for block in blocks]
    described += [describe_leaves("head", after)] if after else []
    runs: list[tuple[Block, int]] = []
    for block in described:
        if runs and runs[-1][0] == block:
            runs[-1] = (block, runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    hidden = max((block.width for block, _ in runs), default=1)
    counted = sum(block.parameters * count for block, count in runs)
    tied = max(
        0, counted - sum(p.numel() for p in module.parameters())
    )  # a shared weight is met twice and stored once
    return Model(
        type(module).__name__, tuple(runs), seq_len=seq_len, tied_parameters=tied, hidden=hidden
    )


def _leaves(module: nn.Module) -> list[nn.Module]:
    """The modules in a module, or it itself, that hold no others."""
    return [part for part in module.modules() if not list(part.children())]


def describe_leaves(name: str, leaves: list[PyTree]) -> Block:
    """A block of what these layers say of themselves."""
    operations: list[Operation] = []
    saved = 0.0
    width = 1
    for leaf in leaves:
        kind = type(leaf).__name__
        if kind == "Linear":
            operations.append(
                Matmul(
                    kind, leaf.in_features, leaf.out_features, "none", bias=leaf.bias is not None
                )
            )
            saved = saved + leaf.in_features
            width = leaf.out_features
        elif kind == "Embedding":
            operations.append(Lookup(kind, leaf.num_embeddings, leaf.embedding_dim, "none"))
            width = leaf.embedding_dim
        elif kind.startswith("Conv"):
            outputs, inputs, *kernel = leaf.weight.shape
            area = 1
            for side in kernel:
                area *= side
            operations.append(
                Matmul(kind, inputs * area, outputs, "none", bias=leaf.bias is not None)
            )
            saved = saved + inputs
            width = outputs
        else:
            count = sum(p.numel() for p in leaf.parameters(recurse=False))
            if count:
                operations.append(Elementwise(kind, width, width, "none", count))
                saved += width
    return Block(name, tuple(operations), Saved(sequence=saved), width)
