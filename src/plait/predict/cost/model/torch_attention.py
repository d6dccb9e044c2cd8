"""Operations of `nn.MultiheadAttention`, from what it is given in a forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from plait.predict.cost.model.operations import Attention, Matmul, Operation
from plait.values import PyTree


def is_torch_attention(module: Any) -> bool:
    """Whether a module runs torch's forward of attention, with queries and keys of one width."""
    from torch import nn

    from plait.forwards import runs_forward_of

    if not runs_forward_of(module, nn.MultiheadAttention):
        return False
    return module._parameters.get("in_proj_weight") is not None


def arguments(
    module: Any, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults."""
    call = inspect.signature(module.forward).bind(*args, **kwargs)
    call.apply_defaults()
    return dict(call.arguments)


def operations_of(
    module: Any, given: Mapping[str, Any], tokens: float, *, is_split: bool
) -> list[Operation]:
    """Projections, attention and the output's projection; a tensor axis divides what `is_split`.

    `tokens`: those of the model's input, of which rows are counted.
    """
    width, heads = module.embed_dim, module.num_heads
    query, key, value = (given[name] for name in ("query", "key", "value"))
    inputs: list[tuple[Any, int]] = [(query, 1), (key, 1), (value, 1)]
    if query is key and key is value:
        inputs = [(query, 3)]
    elif key is value:
        inputs = [(query, 1), (key, 2)]
    has_bias = module.in_proj_bias is not None
    split = "column" if is_split else "none"
    operations: list[Operation] = [
        Matmul(
            "linear",
            width,
            width * number,
            split,  # type: ignore[arg-type]
            x.numel() / width / tokens,
            has_bias,
            parts=(width,) * number if number > 1 else (),
            raw=not x.requires_grad,
        )
        for x, number in inputs
    ]
    has_dropout = module.training and module.dropout > 0.0
    is_fused = not (given["need_weights"] or has_dropout)
    size = width // heads
    causal = bool(given["is_causal"])
    operations.append(
        Attention("attention", heads, heads, size, size, causal, is_fused, has_dropout)
    )
    rows = query.numel() / width / tokens
    bias = module.out_proj.bias is not None
    operations.append(Matmul("linear", width, width, "row" if is_split else "none", rows, bias))
    return operations
