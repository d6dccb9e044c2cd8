"""Demands of an operation on its inputs, where its outputs are wanted cut: one rule a kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.models.derived.cuts import ALIKE, Cut, Misfit, Want, even, joined, reshaped
from plait.models.derived.record import MADE, GraphNode, Value, draws
from plait.values import PyTree

Asked = list[tuple[Value, Want]]
Windows = dict[int, list[tuple[int, int, Want]]]
SAME_ORDER = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "unsqueeze", "squeeze"),
    *("clone", "contiguous", "alias", "detach", "_to_copy", "lift_fresh"),
}
REDUCTIONS = {
    *("_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "cumsum", "sum", "mean", "prod"),
    *("amax", "amin", "argmax", "max", "min", "any", "all", "var", "std", "norm"),
    "linalg_vector_norm",
}
LIKE_POINTWISE = {"masked_fill", "where", "native_dropout", "copy_", "fill_", "zero_", "bernoulli"}


def operation(node: GraphNode) -> str:
    """The name of an operation, without its overload."""
    return str(node.func._schema.name).rpartition("::")[2]


def ask(node: GraphNode, wants: Sequence[Want | None], size: int) -> Asked:
    """The demands of a node on its inputs; raises `Misfit` where a cut does not pass."""
    cuts = [(index, want) for index, want in enumerate(wants) if isinstance(want, Cut)]
    if not cuts:
        return [(value, ALIKE) for value in node.inputs]
    index, cut = cuts[0]
    name = operation(node)
    out = node.outputs[index]
    assert out is not None
    if draws(node.func):
        raise Misfit(
            f"{name} draws random numbers for {cut.of(out.shape)}; one device's numbers are known "
            "for nn.Dropout, F.dropout and F.scaled_dot_product_attention"
        )
    if name in SAME_ORDER and node.inputs:
        source = node.inputs[0]
        return [(source, reshaped(cut, out.shape, source.shape, size))]
    if name in MADE:
        return []
    rule = RULES.get(name)
    if rule is not None:
        return rule(node, cut, out, size)
    pointwise = torch.Tag.pointwise in node.func.tags or name in LIKE_POINTWISE
    if pointwise:
        return [(value, _broadcast(node, cut, out, value)) for value in node.inputs]
    raise Misfit(f"no rule says how {name} passes on {cut.of(out.shape)}")


def _broadcast(node: GraphNode, cut: Cut, out: Value, value: Value) -> Want:
    """The cut of an operand that is stretched to the shape of the output."""
    dim = cut.dim - (len(out.shape) - len(value.shape))
    if dim < 0 or value.shape[dim] == 1:
        return ALIKE
    if value.shape[dim] != out.shape[cut.dim]:
        raise Misfit(
            f"{operation(node)} puts a tensor {list(value.shape)} at a place of {cut.of(out.shape)}"
        )
    return Cut(dim, cut.parts)


def _argument(node: GraphNode, position: int, default: Any = None) -> Any:
    args: PyTree = node.args[0]
    return args[position] if len(args) > position else default


def _permute(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
    order = [int(dim) % len(out.shape) for dim in _argument(node, 1)]
    return [(node.inputs[0], Cut(order[cut.dim], cut.parts))]


def _transpose(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
    rank = len(out.shape)
    first, second = (int(_argument(node, place, place - 1)) % rank for place in (1, 2))
    swapped = {first: second, second: first}
    return [(node.inputs[0], Cut(swapped.get(cut.dim, cut.dim), cut.parts))]


def _expand(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
    return [(node.inputs[0], _broadcast(node, cut, out, node.inputs[0]))]


def _repeat(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
    source = node.inputs[0]
    dim = cut.dim - (len(out.shape) - len(source.shape))
    if dim < 0 or source.shape[dim] != out.shape[cut.dim]:
        raise Misfit(f"repeat copies along {cut.of(out.shape)}")
    return [(source, Cut(dim, cut.parts))]


def _reduction(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
    source = node.inputs[0]
    dims = _argument(node, 1)
    if operation(node) in ("linalg_vector_norm", "norm"):
        dims = _argument(node, 2)
    if dims is None:
        raise Misfit(f"{operation(node)} reduces all dimensions of {list(source.shape)} to one")
    dims = [dims] if isinstance(dims, int) else list(dims)
    gone = {int(dim) % len(source.shape) for dim in dims}
    dim = cut.dim
    if len(out.shape) < len(source.shape):
        left = [one for one in range(len(source.shape)) if one not in gone]
        dim = left[cut.dim]
    if dim in gone:
        raise Misfit(f"{operation(node)} reduces {Cut(dim, cut.parts).of(source.shape)}")
    return [(source, Cut(dim, cut.parts))]


def _cat(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
    dim = int(_argument(node, 1, 0)) % len(out.shape)
    full = [value for value in node.inputs if value.shape != (0,)]
    demands: Asked = [(value, ALIKE) for value in node.inputs if value.shape == (0,)]
    if dim != cut.dim:
        return demands + [(value, Cut(cut.dim, cut.parts)) for value in full]
    left = list(cut.parts)
    for value in full:
        parts_taken: list[tuple[int, bool]] = []
        while left and sum(length for length, _ in parts_taken) < value.shape[dim]:
            parts_taken.append(left.pop(0))
        if sum(length for length, _ in parts_taken) != value.shape[dim]:
            raise Misfit(
                f"cat joins tensors along {cut.of(out.shape)}, and a part is of two of them"
            )
        whole = not any(is_cut for _, is_cut in parts_taken)
        demands.append((value, ALIKE if whole else Cut(dim, joined(parts_taken))))
    return demands


def _stack(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
    dim = int(_argument(node, 1, 0)) % len(out.shape)
    if dim == cut.dim:
        raise Misfit(f"stack makes {cut.of(out.shape)}")
    return [(value, Cut(cut.dim - (cut.dim > dim), cut.parts)) for value in node.inputs]


def _matmul(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
    """Products: in `addmm` and `baddbmm` what is added stands before the factors."""
    *added, left, right = node.inputs
    demands: Asked = [(value, _broadcast(node, cut, out, value)) for value in added]
    rank = len(out.shape)
    if cut.dim == rank - 2:
        return [*demands, (left, cut), (right, ALIKE)]
    if cut.dim == rank - 1:
        return [*demands, (left, ALIKE), (right, cut)]
    return [*demands, (left, cut), (right, cut)]


def _attention(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
    """Queries, keys and values [B, heads, S, K]; of keys and values there may be fewer heads."""
    if cut.dim > 1:
        raise Misfit(f"attention gives {cut.of(out.shape)}; only samples and heads can be cut")
    query, *others = node.inputs
    demands: Asked = [(query, cut)]
    for value in others[:2]:
        heads = value.shape[1]
        if cut.dim == 1 and heads != query.shape[1]:
            if len(cut.parts) > 1 or heads % size:
                raise Misfit(
                    f"attention has {query.shape[1]} heads of queries and {heads} of keys, and "
                    f"{size} ranks do not divide both"
                )
            demands.append((value, even(1, heads)))
        else:
            demands.append((value, cut))
    return demands + [(value, _broadcast(node, cut, out, value)) for value in others[2:]]


def _padding(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
    padded = len(_argument(node, 1)) // 2
    if cut.dim >= len(out.shape) - padded:
        raise Misfit(f"{operation(node)} pads {cut.of(out.shape)}")
    return [(node.inputs[0], cut)]


def _other_dims(position: int) -> Callable[[GraphNode, Cut, Value, int], Asked]:
    """A rule of operations that mix along the dimensions in one argument."""

    def rule(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
        dims = _argument(node, position)
        dims = [dims] if isinstance(dims, int) else list(dims)
        if cut.dim in {int(dim) % len(out.shape) for dim in dims}:
            raise Misfit(f"{operation(node)} mixes {cut.of(out.shape)}")
        return [(value, cut) for value in node.inputs[:1]]

    return rule


def _triangle(node: GraphNode, cut: Cut, out: Value, size: int) -> Asked:
    if cut.dim >= len(out.shape) - 2:
        raise Misfit(f"{operation(node)} masks a triangle along {cut.of(out.shape)}")
    return [(node.inputs[0], cut)]


RULES: dict[str, Callable[[GraphNode, Cut, Value, int], Asked]] = {
    "permute": _permute,
    "transpose": _transpose,
    "t": lambda node, cut, out, size: [(node.inputs[0], Cut(1 - cut.dim, cut.parts))],
    "expand": _expand,
    "repeat": _repeat,
    "cat": _cat,
    "stack": _stack,
    "flip": _other_dims(1),
    "roll": _other_dims(2),
    "tril": _triangle,
    "triu": _triangle,
    "constant_pad_nd": _padding,
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _matmul),
    **dict.fromkeys(REDUCTIONS, _reduction),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
}


def window(node: GraphNode, index: int) -> tuple[int, int, int] | None:
    """(dim, start, stop) of the part of its input that an output is; None for other operations."""
    name = operation(node)
    if name not in ("slice", "split", "split_with_sizes", "narrow"):
        return None
    source = node.inputs[0]
    if name == "slice":
        dim = int(_argument(node, 1, 0)) % len(source.shape)
        if int(_argument(node, 4, 1)) != 1:
            return dim, 0, source.shape[dim]
        start = int(_argument(node, 2, 0) or 0)
        start = max(start + source.shape[dim], 0) if start < 0 else start
        out = node.outputs[index]
        assert out is not None
        return dim, start, start + out.shape[dim]
    dim = int(_argument(node, 2, 0)) % len(source.shape)
    sizes = [0 if out is None else out.shape[dim] for out in node.outputs]
    start = sum(sizes[:index])
    return dim, start, start + sizes[index]


def through_window(
    node: GraphNode, wants: Sequence[Want | None]
) -> list[tuple[int, int, int, Want]]:
    """(dim, start, stop, want) for each wanted output of a slice or split.

    Raises:
        Misfit: a step above one in a dimension that is cut.
    """
    windows = []
    for index, want in enumerate(wants):
        place = window(node, index)
        if want is None:
            continue
        assert place is not None
        out = node.outputs[index]
        assert out is not None
        if (
            isinstance(want, Cut)
            and want.dim == place[0]
            and place[2] - place[1] != out.shape[place[0]]
        ):
            raise Misfit(f"a slice takes every n-th number of {want.of(node.inputs[0].shape)}")
        windows.append((*place, want))
    return windows


def chosen(node: GraphNode, wants: Sequence[Want | None]) -> Asked:
    """The demands of `select` and `unbind`: the dimension that is chosen from stays whole."""
    source = node.inputs[0]
    dim = int(_argument(node, 1, 0)) % len(source.shape)
    demands: Asked = []
    for want in wants:
        if isinstance(want, Cut):
            demands.append((source, Cut(want.dim + (want.dim >= dim), want.parts)))
        elif want is not None:
            demands.append((source, ALIKE))
    return demands
