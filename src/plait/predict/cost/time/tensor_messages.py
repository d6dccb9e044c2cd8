"""Messages of a tensor axis inside a block, mode by mode, as the engine's own tensor modes send it.

    1d         Shoeybi et al., Megatron-LM; Korthikanti et al. for sequence parallelism: f and g
    around each pair of products
    2d, 2.5d   Xu et al., Optimus; Wang et al., Tesseract: of input X, weight A and output Y two
    move (SUMMA)
    3d         Bian et al.: X and A are gathered and Y is scattered, on three lines of q ranks

A column moves X and A, a row A and Y, in 2d. A gather's backward is the reduce-scatter of its
line. Factors that backward multiplies again are gathered again. `plait.parallel.tensor.products`
runs the same list.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.predict.cost.model.operations import Block, Elementwise, Lookup, Matmul
from plait.predict.cost.sharding import Sharding

TOKEN_BYTES = 8
LOSS_NUMBERS = 3
"""Largest logit, sum of exponentials and the target's logit of each token, gathered from all parts
of the vocabulary.
"""

Add = Callable[..., None]
"""(op, payload bytes, "forward" or "backward", stride=, size=, count=, last=)."""


def line(block: Block, shard: Sharding, width: int, add: Add) -> None:
    """1D. What the last row of a block sums is not needed again by recomputation (`last`), where
    they are two steps.
    """
    full = shard.tokens * width
    sp = shard.sequence_parallel
    inside = [op for op in block.operations if op.name != "residual"]
    for op in block.operations:
        if isinstance(op, Matmul) and op.split == "column":
            payload = full * op.inputs * op.rows
            if sp:
                add("all_gather", payload, "forward")
                if shard.regather:
                    add(
                        "all_gather", payload, "backward"
                    )  # kept sharded, gathered again for the weight's gradient
            if (
                not op.raw
            ):  # the input is used differently by each rank, so its gradient is a partial sum
                add("reduce_scatter" if sp else "all_reduce", payload, "backward")
        elif (isinstance(op, Matmul) and op.split == "row") or isinstance(op, Lookup):
            payload = full * (op.outputs * op.rows if isinstance(op, Matmul) else op.width)
            last = op is inside[-1] and not _is_expert(op) and not shard.fused_rows
            add("reduce_scatter" if sp else "all_reduce", payload, "forward", last=last)
            if sp:
                add("all_gather", payload, "backward")
        if isinstance(op, Matmul) and op.name == "head":
            add("all_gather", shard.tp * LOSS_NUMBERS * shard.tokens * max(4, width), "forward")


def _is_expert(op: object) -> bool:
    return (
        isinstance(op, Matmul) and op.copies > 1
    )  # its sum is weighed by the router, which keeps it


def grid(block: Block, shard: Sharding, width: int, add: Add) -> None:
    """2D, 2.5D and 3D; `rows` are the tokens that one rank keeps."""
    q = shard.q
    wide = max(4, width)
    tokens = shard.tokens / shard.sample_parts
    product = _three_d if shard.mode == "3d" else _two_d
    features = q * q if shard.mode == "3d" else 1  # the stride of the line that cuts features
    for op in block.operations:
        if isinstance(op, Matmul) and op.split in {"column", "row"}:
            product(op, shard, tokens * op.rows, width, add)
        elif isinstance(
            op, Matmul
        ):  # replicated: whole features, computed by every rank of the line
            add(
                "all_gather",
                tokens * op.rows * op.inputs * width,
                "forward",
                stride=features,
                size=q,
            )
        elif isinstance(op, Elementwise) and op.statistics:
            told = op.statistics * tokens * wide
            centered = op.statistics > 1
            add(
                "all_gather" if centered else "all_reduce",
                told * (q if centered else 1),
                "forward",
                stride=features,
                size=q,
            )
            add("all_reduce", told, "backward", stride=features, size=q)
        elif isinstance(op, Lookup):
            found = tokens * q * op.width / q * width
            add("all_gather", tokens * q * TOKEN_BYTES, "forward", stride=q, size=q)
            if shard.mode == "3d":
                add("all_gather", op.rows * op.width / (q * q) * width, "forward", size=q)
                add("reduce_scatter", op.rows * op.width / (q * q) * width, "backward", size=q)
            add("reduce_scatter", found, "forward", stride=q, size=q)
            add("all_gather", found, "backward", stride=q, size=q)
        if isinstance(op, Matmul) and op.name == "head" and op.split == "column":
            stride = q if shard.mode == "3d" else 1
            add("all_gather", q * LOSS_NUMBERS * tokens * wide, "forward", stride=stride, size=q)


def _two_d(op: Matmul, shard: Sharding, tokens: float, width: int, add: Add) -> None:
    q = shard.q
    weight = op.inputs * op.outputs / q * width
    row = (
        op.split == "row" or op.name == "head"
    )  # a head lies as the embedding does, so that both can be one table
    add("all_gather", weight, "forward", stride=q, size=q)
    add("reduce_scatter", weight, "backward", stride=q, size=q)
    if row:
        moved = tokens * op.outputs * width
        add("reduce_scatter", moved, "forward", size=q)
        add("all_gather", moved, "backward", size=q)
    else:
        moved = tokens * op.inputs * width
        add("all_gather", moved, "forward", size=q)
        add("all_gather", moved, "backward", size=q)
    if not op.raw:
        add("all_gather", weight, "backward", stride=q, size=q)
        if not row:
            add("reduce_scatter", moved, "backward", size=q)


def _three_d(op: Matmul, shard: Sharding, tokens: float, width: int, add: Add) -> None:
    q = shard.q
    lines = (
        (q, q * q) if op.split == "column" else (q * q, q)
    )  # j gathers X and l scatters Y, or the other way round
    x = tokens * op.inputs * width
    y = tokens * op.outputs * width
    weight = op.inputs * op.outputs / (q * q) * width
    add("all_gather", x, "forward", stride=lines[0], size=q)
    add("all_gather", weight, "forward", size=q)
    add("reduce_scatter", y, "forward", stride=lines[1], size=q)
    add("all_gather", y, "backward", stride=lines[1], size=q)
    if not op.raw:
        add("all_gather", weight, "backward", size=q)
        add("reduce_scatter", x, "backward", stride=lines[0], size=q)
    add("all_gather", x, "backward", stride=lines[0], size=q)
    add("reduce_scatter", weight, "backward", size=q)
